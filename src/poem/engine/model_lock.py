"""One lock per model: adapters that share it take turns."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn


@dataclass
class ModelLock:
    """The lock of one model, and how many adapters share it."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    adapters: int = 0


_LOCKS: WeakKeyDictionary[nn.Module, ModelLock] = WeakKeyDictionary()


def model_lock(model: nn.Module) -> ModelLock:
    """The one lock of this model in this process."""
    return _LOCKS.setdefault(model, ModelLock())


def _unlock_all() -> None:
    """In a forked process: a thread that held a lock in the parent does not exist here."""
    for each in _LOCKS.values():
        each.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_all)
