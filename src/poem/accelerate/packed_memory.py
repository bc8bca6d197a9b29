"""Small tensors of the state's memory as rows of a few larger ones.

A network with fifty batch norms remembers several hundred small tensors. One by one, copying them costs more of the
host's time than the network costs the GPU at one image; those of one type and shape are rows of one block instead, and
a block is copied at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from operator import is_

import torch
from torch import Tensor

from poem.accelerate.foreach import copy_each
from poem.engine.state import MANY, SMALL
from poem.parts.base import Memory


@dataclass(frozen=True)
class MemoryLayout:
    """Which tensors of the memory are rows of which block: of each type and shape, the names in order."""

    blocks: tuple[tuple[torch.dtype, torch.device, torch.Size, tuple[str, ...]], ...]

    @classmethod
    def of(cls, memory: Memory) -> MemoryLayout:
        """Of all small tensors; of none where they are so few that copying them one by one costs nothing.

        In the order of names: loops that are captured from one state, for batches of other shapes, share a layout.
        """
        kinds: dict[tuple[torch.dtype, torch.device, torch.Size], list[str]] = {}
        for name, tensor in sorted(memory.items()):
            if tensor.numel() <= SMALL:
                kinds.setdefault((tensor.dtype, tensor.device, tensor.shape), []).append(name)
        many = sum(map(len, kinds.values())) >= MANY
        return cls(tuple((*kind, tuple(names)) for kind, names in kinds.items() if many))

    @property
    def names(self) -> Iterable[str]:
        """Every tensor's, block by block."""
        return chain.from_iterable(names for *_, names in self.blocks)

    def fits(self, memory: Memory) -> bool:
        """Whether a memory has all these tensors, with these types and shapes."""
        return all(
            name in memory and memory[name].dtype == kind and memory[name].shape == shape
            for kind, _, shape, names in self.blocks
            for name in names
        )

    def packed(self, memory: Memory) -> PackedMemory:
        """These tensors of a memory, copied into blocks."""
        found = self._filled(
            [torch.empty(len(names), *shape, dtype=kind, device=device) for kind, device, shape, names in self.blocks]
        )
        copy_each(found.rows.values(), [memory[name] for name in found.rows])
        return found

    def _filled(self, blocks: list[Tensor]) -> PackedMemory:
        """Blocks of this layout, and each tensor as a row of its block."""
        rows = chain.from_iterable(block.unbind() for block in blocks)
        return PackedMemory(self, blocks, dict(zip(self.names, rows, strict=True)))


@dataclass(frozen=True)
class PackedMemory:
    """Tensors of a memory that lie in blocks; none of them is ever written into once the state has it."""

    layout: MemoryLayout
    blocks: list[Tensor]
    rows: Memory

    def is_in(self, memory: Memory) -> bool:
        """Whether a memory has these very tensors."""
        return all(map(is_, map(memory.get, self.rows), self.rows.values()))

    def copied(self) -> PackedMemory:
        """The same numbers in memory of their own."""
        found = self.layout._filled([torch.empty_like(block) for block in self.blocks])
        found.copy_from(self)
        return found

    def copy_from(self, other: PackedMemory) -> None:
        """Write the numbers of a memory with this layout here, as before a replay, which reads them here."""
        copy_each(self.blocks, other.blocks)
