"""Named parameters of a module tree as one flat vector, and other tensors put in their place for one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch import Tensor, nn

Swap = tuple[nn.Module, str, Tensor]
"""A module, the name of one of its parameters, and the tensor to put there."""
HALF = (torch.float16, torch.bfloat16)
_KIND = attrgetter("dtype")


class ParameterGroup:
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
        self.sizes = tuple(parameter.numel() for parameter in self.own)

    def refresh(self) -> None:
        """Read the parameters again from their modules."""
        self._any = next(self._root.parameters(), torch.zeros(0))  # says where the model is
        self.own = [cast(Tensor, places[0][0]._parameters[places[0][1]]) for places in self.places]
        """The parameters themselves."""

    @property
    def size(self) -> int:
        """How many numbers are adapted."""
        return sum(self.sizes)

    def source(self) -> Tensor:
        """The model's own values as a new flat vector, in single precision where the model has less."""
        if not self.own:
            return torch.zeros(0, device=self._any.device)
        flat = [p.detach().float() if p.dtype in HALF else p.detach() for p in self.own]
        return torch.cat([tensor.reshape(-1) for tensor in flat])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector, by name and in shape; of rows of them (B, P), the same with B in front."""
        pieces = torch.split(flat, list(self.sizes), dim=-1) if self.sizes else ()
        rows = flat.shape[:-1]
        return {n: piece.view(*rows, *p.shape) for n, piece, p in zip(self.names, pieces, self.own, strict=True)}

    def swaps(self, flat: Tensor) -> list[Swap]:
        """What to put where for the values of a flat vector, in the precision that the model computes in."""
        pieces = zip(self.named(flat).values(), self.own, self.places, strict=True)
        return [(module, key, piece.to(p.dtype)) for piece, p, places in pieces for module, key in places]


def by_module(swaps: Sequence[Swap]) -> dict[nn.Module, dict[str, Tensor]]:
    """The tensors of each module, by parameter name."""
    found: dict[nn.Module, dict[str, Tensor]] = {}
    for module, key, tensor in swaps:
        found.setdefault(module, {})[key] = tensor
    return found


@contextmanager
def swapped(swaps: Sequence[Swap]) -> Iterator[None]:
    """The given tensors stand where parameters stood, until the block ends."""
    before = [(module, key, module._parameters[key]) for module, key, _ in swaps]
    try:
        for module, key, tensor in swaps:
            module._parameters[key] = tensor  # type: ignore[assignment]  # a view with a gradient, for one pass
        yield
    finally:
        for module, key, parameter in before:
            module._parameters[key] = parameter


def memory_places(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Where tensors lie and how they are read there; a sparse one has no single place."""
    try:  # most models have none, and this is asked at every call
        here = [each for each in tensors if each is not None]
        pointers, strides = map(Tensor.data_ptr, here), map(Tensor.stride, here)
        absent = map(is_, tensors, repeat(None))
        return [*absent, *zip(pointers, strides, map(Tensor.size, here), map(_KIND, here), strict=True)]
    except RuntimeError:
        return [
            (each.data_ptr(), each.dtype, each.shape, each.stride())
            if each is not None and each.layout == torch.strided
            else id(each)
            for each in tensors
        ]
