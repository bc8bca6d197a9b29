"""Norm layers of the twin: their forward is replaced by one with statistics of the recipe's choosing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from poem.accelerate.batch_norm import FORWARD, Normed, fusable
from poem.accelerate.weight_casts import Swap
from poem.parts.base import Memory
from poem.parts.statistics import FromBatch, Statistics


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


@dataclass
class Pass:
    """What a pass needs to know while it runs."""

    statistics: Statistics
    memory: Memory
    mask: Tensor | None = None
    branch: Literal["none", "doubled", "alone"] = "none"
    swaps: Mapping[nn.Module, list[Swap]] = field(default_factory=dict)  # the branch's affine tensors, per layer
    doubled: bool = False  # the split has been passed and the batch now holds both halves
    record: Memory = field(default_factory=dict)
    features: Tensor | None = None
    rows: int = 0  # images in the batch
    ran: set[str] = field(default_factory=set)  # norm layers that were asked
    traced: bool = False  # to be compiled: what it does is written down, not done


class BorrowedNorm:
    """Takes the place of a norm layer's forward.

    Every verb ends in the layer's own forward, or in kernels of ours where that is torch's and they say the same.
    """

    def __init__(self, name: str, layer: nn.Module, current: Callable[[], Pass], *, swappable: bool) -> None:
        self.name, self.layer, self._current, self.swappable = name, layer, current, swappable
        self.batch = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        self.own: Callable[..., Tensor] = layer.forward

    def patch(self) -> None:
        """Replace the layer's forward, which is called from here."""
        self.own = self.layer.forward
        self.layer.__dict__["forward"] = self

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        """The layer with the source's tensors, the branch's, or each on its half."""
        x, *rest = args or (named.pop(next(iter(named))),)
        run = self._current()
        run.ran.add(self.name)
        swaps = run.swaps.get(self.layer, [])
        if run.branch == "alone":
            with swapped(swaps):
                return self._one(x, rest, named, run, f"branch.{self.key}" if swaps else self.key)
        if not run.doubled:
            if swaps:
                raise RuntimeError(f"expected the layer {self.name!r} after the split, it ran before; pass split=")
            return self._one(x, rest, named, run, self.key)
        if self._fuses(x, run, groups=2):
            with swapped(swaps):
                other = self._affine()
            return self._normed(x, run, self._affine(), other)
        source, branch = x.chunk(2)
        first = self._one(source, rest, named, run, self.key)
        with swapped(swaps):
            return torch.cat([first, self._one(branch, rest, named, run, f"branch.{self.key}")])

    def _one(self, x: Tensor, rest: list[Any], named: dict[str, Any], run: Pass, key: str) -> Tensor:
        """One head's share, with the statistics that the recipe chose."""
        if not self.batch:
            return self.own(x, *rest, **named)
        if self._fuses(x, run, groups=1):
            return self._normed(x, run, self._affine())
        run.record.update(run.statistics.remember(self, x, run.mask, run.memory, key))
        return run.statistics(self, x, run.mask, run.memory, key)

    def _fuses(self, x: Tensor, run: Pass, *, groups: int) -> bool:
        """Whether the batch's own statistics are asked for, of a layer that our kernels know."""
        asked = self.batch and type(run.statistics) is FromBatch and run.mask is None
        own = getattr(self.own, "__func__", None) is FORWARD
        return asked and own and fusable(self.layer, x, groups, traced=run.traced)

    def _affine(self) -> tuple[Tensor, Tensor]:
        """Scale and shift that stand in the layer now, number beside number."""
        layer: Any = self.layer
        return layer.weight.contiguous(), layer.bias.contiguous()

    def _normed(self, x: Tensor, run: Pass, *affine: tuple[Tensor, Tensor]) -> Tensor:
        """Normalised by our kernels, with a scale and a shift for each group of rows."""
        eps = float(self.layer.eps)  # type: ignore[arg-type]
        if run.traced:
            from poem.accelerate import compiled_batch_norm as _traced  # only for those who compile

            return _traced.batch_normed(x, affine, eps)
        y: Tensor = Normed.apply(x, eps, *(tensor for pair in affine for tensor in pair))
        return y

    @property
    def key(self) -> str:
        """Under which name the layer's statistics are remembered."""
        return f"statistics.{self.name}"

    @property
    def source_mean(self) -> Tensor | None:
        """The running mean that came with the model."""
        return self.layer._buffers.get("running_mean")

    @property
    def source_var(self) -> Tensor | None:
        """The running variance that came with the model."""
        return self.layer._buffers.get("running_var")

    def with_source(self, x: Tensor) -> Tensor:
        """As the layer came, in eval mode."""
        return self.own(x)

    def with_batch(self, x: Tensor) -> Tensor:
        """In training mode, with tracking off so that the running statistics stay."""
        with _set(self.layer, training=True, track_running_stats=False):
            return self.own(x)

    def with_moments(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Normalised here; the layer then scales and shifts, and whatever else it does, with neutral statistics."""
        eps = float(self.layer.eps)  # type: ignore[arg-type]
        shape = (1, -1, *[1] * (x.dim() - 2))
        normal = ((x - mean.view(shape)) * (var.view(shape) + eps).rsqrt()).to(x.dtype)
        buffers = self.layer._buffers
        own = buffers.get("running_mean")
        kind = x.dtype if own is None else own.dtype
        neutral = torch.zeros_like(mean, dtype=kind), torch.full_like(var, 1 - eps, dtype=kind)
        before = buffers.get("running_mean"), buffers.get("running_var")
        buffers["running_mean"], buffers["running_var"] = neutral
        try:
            return self.own(normal)
        finally:
            buffers["running_mean"], buffers["running_var"] = before


@contextmanager
def _set(module: nn.Module, **flags: bool) -> Iterator[None]:
    """Flags of a module, until the block ends."""
    before = {name: getattr(module, name) for name in flags}
    module.__dict__.update(flags)
    try:
        yield
    finally:
        module.__dict__.update(before)
