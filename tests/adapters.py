"""How the contract and the references make their adapters: as pytest's command line asks.

    pytest tests/test_contract.py --fast                  # every adapter captures its loop and replays it
    pytest tests/test_contract.py --fast --device cuda    # the same on a GPU, as CUDA graphs

On a CPU a tape stands in for CUDA graphs (`tape.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import tape
import torch
from torch import Tensor, nn

import poem
import poem.engine.loop


@dataclass
class Asked:
    """The options `--fast` and `--device`; conftest fills them in before any test is collected."""

    fast: bool = False
    device: str = "cpu"


ASKED = Asked()
Movable = TypeVar("Movable", Tensor, nn.Module)


def adapt(model: nn.Module, method: str | poem.Recipe, **changes: Any) -> poem.Adapter:
    """`poem.adapt`, with `fast=True` under `--fast` unless the test says otherwise."""
    return poem.adapt(model, method, **({"fast": True} if ASKED.fast else {}) | changes)


def on_device(what: Movable) -> Movable:
    """A tensor or a network, on the device of `--device`."""
    return what.to(ASKED.device)


@contextmanager
def capturing(device: str) -> Iterator[None]:
    """Inside, `fast=True` captures: on a GPU CUDA graphs, on a CPU tapes.

    A captured loop runs backward over whole batches, so eager loops, with which it is compared, do so too.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch, tape.installed() if device == "cpu" else nullcontext():
        patch.setattr(poem.accelerate.selected_rows, "BACKWARD_RATIO", torch.inf)
        torch.use_deterministic_algorithms(device == "cuda" or deterministic, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
