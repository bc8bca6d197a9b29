"""What is borrowed: a model, by one caller at a time, and in it the parameters that may move."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from poem.accelerate.weight_casts import Swap

HALF = (torch.float16, torch.bfloat16)


@dataclass
class Lease:
    """Who else uses the model: one call at a time, any number of adapters."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    borrowers: int = 0


_LEASES: WeakKeyDictionary[nn.Module, Lease] = WeakKeyDictionary()


def lease(model: nn.Module) -> Lease:
    """The one lease of this model in this process."""
    return _LEASES.setdefault(model, Lease())


def _unlock_all() -> None:
    """In a forked process: a thread that held a lock in the parent does not exist here."""
    for each in _LEASES.values():
        each.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_all)


class Group:
    """Named parameters of a module tree, seen as one flat vector."""

    def __init__(self, root: nn.Module, names: Sequence[str]) -> None:
        parameters = dict(root.named_parameters())
        self.names, self._root = tuple(names), root
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in root.modules():  # a tied parameter stands in several places
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), []).append((module, attribute))
        self.places = [places[id(parameters[name])] for name in names]
        """Module and attribute of each parameter, for a tied one several."""
        self.refresh()
        self._sizes = [parameter.numel() for parameter in self.own]

    def refresh(self) -> None:
        """Read the parameters again where they stand now."""
        self._any = next(self._root.parameters(), torch.zeros(0))  # says where the model is
        self.own = [cast(Tensor, places[0][0]._parameters[places[0][1]]) for places in self.places]
        """The parameters themselves."""

    @property
    def size(self) -> int:
        """How many numbers may move."""
        return sum(self._sizes)

    def source(self) -> Tensor:
        """The model's own values as a new flat vector, in single precision where the model has less."""
        if not self.own:
            return torch.zeros(0, device=self._any.device)
        flat = [p.detach().float() if p.dtype in HALF else p.detach() for p in self.own]
        return torch.cat([tensor.reshape(-1) for tensor in flat])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector, by name and in shape."""
        pieces = torch.split(flat, self._sizes) if self._sizes else ()
        return {n: piece.view(p.shape) for n, piece, p in zip(self.names, pieces, self.own, strict=True)}

    def swaps(self, flat: Tensor) -> list[Swap]:
        """Where each piece of a flat vector goes, in the precision that the model computes in."""
        pieces = zip(self.named(flat).values(), self.own, self.places, strict=True)
        return [(module, key, piece.to(p.dtype)) for piece, p, places in pieces for module, key in places]
