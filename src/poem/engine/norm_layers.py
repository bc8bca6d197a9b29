"""Norm layers of the twin: their forward is replaced by one with statistics of the recipe's choosing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from poem.engine.acceleration import Acceleration
from poem.engine.parameter_groups import Swap, swapped
from poem.engine.sample_rows import RowScaling, SampleRows
from poem.parts.base import Memory
from poem.parts.statistics import FromBatch, Source, Statistics

PLAIN_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Layers that do nothing but normalise, scale and shift."""


@dataclass(frozen=True)
class Doubled:
    """A tensor that was doubled at the split, and the two equal halves that were made of it."""

    once: Tensor
    twice: Tensor
    versions: tuple[int, int]

    @staticmethod
    def of(once: Tensor) -> Doubled:
        """Doubles the tensor along the batch."""
        twice = torch.cat([once, once])
        return Doubled(once, twice, (once._version, twice._version))

    @property
    def equal(self) -> bool:
        """Whether both halves still are the tensor: neither has been written to."""
        return self.versions == (self.once._version, self.twice._version)


@dataclass
class ForwardContext:
    """What layers need to know while a forward pass runs, and what they recorded."""

    statistics: Statistics
    memory: Memory
    mask: Tensor | None = None
    branch: Literal["none", "doubled", "alone"] = "none"
    swaps: Mapping[nn.Module, list[Swap]] = field(default_factory=dict)  # the branch's affine tensors, per layer
    theta_rows: Mapping[nn.Module, SampleRows] = field(default_factory=dict)  # each sample's own tensors, per layer
    branch_rows: Mapping[nn.Module, SampleRows] = field(default_factory=dict)  # and the branch's
    doubled: bool = False  # the split has been passed and the batch now holds both halves
    twins: list[Doubled] = field(default_factory=list)  # the tensors that were doubled there
    record: Memory = field(default_factory=dict)
    features: Tensor | None = None
    source: Tensor | None = None  # logits of the copy with the source's statistics, where there is one
    rows: int = 0  # rows that the model is called with
    columns: int = 0  # logits of each row, before a class mask
    copies: int = 1  # how often each image is among them, each copy with statistics of its own
    copied: bool = True  # the batch holds all copies already; else the first batch norm makes them
    ran: set[str] = field(default_factory=set)  # names of norm layers that ran
    training: bool = False  # its outputs are learnt from
    keep: Tensor | None = None  # (B, K) patches that a vision transformer is shown; None: all
    attention: Tensor | None = None  # (B, 1 + T) of the class token, in the last block


def contiguous_on_cpu(x: Tensor) -> Tensor:
    """Contiguous input for a group norm on a CPU, where torch 2.6 to 2.11, maybe later, crash on its backward pass.

    Channels last, and where the gradient of the input is not asked for, they write to memory that is not there.
    """
    return x.contiguous() if x.device.type == "cpu" else x


class PatchedNorm:
    """Replaces a norm layer's forward; every method ends in the layer's own forward, or in a faster equal of it."""

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        current: Callable[[], ForwardContext],
        acceleration: Acceleration,
        *,
        swappable: bool,
    ) -> None:
        self.name, self.layer, self._current, self.swappable = name, layer, current, swappable
        self._acceleration = acceleration
        self.batch = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        self.own: Callable[..., Tensor] = layer.forward
        self._row_scaling = RowScaling(name, layer)

    def patch(self) -> None:
        """Replace the layer's forward, which is called from here."""
        self.own = self.layer.forward
        self.layer.__dict__["forward"] = self

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        """The layer with the source's tensors, the branch's, or each on its half."""
        x, *rest = args or (named.pop(next(iter(named))),)
        run = self._current()
        run.ran.add(self.name)
        if self.batch and not run.copied:
            run.copied = True
            x = torch.cat([x] * run.copies)  # unlike repeat, it keeps channels last
        swaps, rows = run.swaps.get(self.layer, []), run.branch_rows.get(self.layer)
        if run.branch == "alone":
            with swapped(swaps):
                key = f"branch.{self.key}" if swaps else self.key
                return self._one(x, rest, named, run, key, rows or run.theta_rows.get(self.layer))
        if not run.doubled:
            if swaps:
                raise RuntimeError(f"expected the layer {self.name!r} after the split, it ran before; pass split=")
            return self._one(x, rest, named, run, self.key, run.theta_rows.get(self.layer))
        fused = None if rest or named else self._fused(x, run, groups=2)
        if fused is not None:
            return fused
        source, branch = x.chunk(2)
        first = self._one(source, rest, named, run, self.key)
        with swapped(swaps):
            return torch.cat([first, self._one(branch, rest, named, run, f"branch.{self.key}", rows)])

    def _one(
        self,
        x: Tensor,
        rest: list[Any],
        named: dict[str, Any],
        run: ForwardContext,
        key: str,
        rows: SampleRows | None = None,
    ) -> Tensor:
        """One head's share, all samples with the layer's affine tensors, or each with its own."""
        normalised = partial(self._normalised, x, rest, named, run, key)
        return normalised() if rows is None else self._row_scaling(rows, run.copies, normalised)

    def _normalised(self, x: Tensor, rest: list[Any], named: dict[str, Any], run: ForwardContext, key: str) -> Tensor:
        """The layer with the statistics that the recipe chose."""
        fused = None if rest or named else self._fused(x, run, groups=1)
        if fused is not None:
            return fused
        if not self.batch:
            # A branch's gradient is asked for without that of its first layers' input; see `contiguous_on_cpu`.
            alone = key != self.key and isinstance(self.layer, nn.GroupNorm) and torch.is_grad_enabled()
            return self.own(contiguous_on_cpu(x) if alone else x, *rest, **named)
        plain = rest or named or run.theta_rows or run.branch_rows
        made = None if plain else self._acceleration.copies_norm(self, x, run, key)
        if made is None:
            made = run.statistics.normalised(self, x, run.mask, run.memory, key)
        y, new = made
        run.record.update(new)
        return y

    def _fused(self, x: Tensor, run: ForwardContext, groups: int) -> Tensor | None:
        """The layer's output by a faster way, each of `groups` of rows with its own tensors; None to run the layer."""
        if run.theta_rows or run.branch_rows:  # each sample has scales and shifts of its own
            return None
        if not self.batch:
            return self._acceleration.sample_norm(self, x, run, groups)
        if groups == 2 and type(run.statistics) is Source:
            return self._given(x, self.source_mean, self.source_var, groups)
        return self._acceleration.batch_norm(self, x, run, groups) if self._plain_batch(run) else None

    def _given(self, x: Tensor, mean: Tensor | None, var: Tensor | None, groups: int = 1) -> Tensor | None:
        """The layer's output with this mean and variance by a faster way; None to run the layer."""
        run = self._current()
        if mean is None or var is None or run.theta_rows or run.branch_rows:
            return None
        return self._acceleration.given_norm(self, x, (mean, var), run, groups)

    def _plain_batch(self, run: ForwardContext) -> bool:
        """Whether the layer normalises with the statistics of the whole batch."""
        return self.batch and type(run.statistics) is FromBatch and run.mask is None

    def affine(self, swaps: Sequence[Swap] = ()) -> tuple[Tensor, Tensor]:
        """Scale and shift that are in the layer now, or with these swaps, contiguous."""
        layer: Any = self.layer
        with swapped(swaps):
            return layer.weight.contiguous(), layer.bias.contiguous()

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

    @property
    def learning(self) -> bool:
        """Whether the pass under way is learnt from."""
        return self._current().training

    def with_source(self, x: Tensor) -> Tensor:
        """As the layer came, in eval mode."""
        fused = self._given(x, self.source_mean, self.source_var)
        return self.own(x) if fused is None else fused

    def with_batch(self, x: Tensor) -> Tensor:
        """In training mode, with tracking off so that the running statistics stay."""
        with _set(self.layer, training=True, track_running_stats=False):
            return self.own(x)

    def with_moments(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """The layer with these in the place of its running statistics: (C,), or a row (K, C) for each of K copies.

        Where a gradient is to flow through them, they are applied first, and the layer's own are neutral.
        """
        if mean.dim() == 2:
            return self._each_copy(x, mean, var)
        if not (mean.requires_grad or var.requires_grad):
            return self._with_buffers(x, mean, var)
        eps = float(self.layer.eps)  # type: ignore[arg-type]
        shape = (1, -1, *[1] * (x.dim() - 2))
        normal = ((x - mean.view(shape)) * (var.view(shape) + eps).rsqrt()).to(x.dtype)
        return self._with_buffers(normal, torch.zeros_like(mean), torch.full_like(var, 1 - eps))

    def _each_copy(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Each of K copies of the batch with its own row (K, C) of the statistics."""
        layer: Any = self.layer
        if type(layer) not in PLAIN_BATCH_NORMS or layer.weight is None:  # what else a layer does is its own
            return torch.cat([self._with_buffers(*piece) for piece in zip(x.chunk(len(mean)), mean, var, strict=True)])
        scale = layer.weight * (var + layer.eps).rsqrt()
        shift = layer.bias - mean * scale
        shape = (len(mean), 1, x.shape[1], *[1] * (x.dim() - 2))
        apart = x.unflatten(0, (len(mean), -1))
        return torch.addcmul(shift.view(shape), apart, scale.view(shape)).to(x.dtype).flatten(0, 1)

    def _with_buffers(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """The layer's own forward in eval mode, or a faster equal, with other running statistics in it."""
        fused = self._given(x, mean, var)
        if fused is not None:
            return fused
        buffers = self.layer._buffers
        before = buffers.get("running_mean"), buffers.get("running_var")
        kind = x.dtype if before[0] is None else before[0].dtype
        buffers["running_mean"], buffers["running_var"] = mean.to(kind), var.to(kind)
        try:
            return self.own(x)
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
