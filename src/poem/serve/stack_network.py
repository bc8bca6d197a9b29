"""One pass through the network for many streams, each with scales, shifts and statistics of its own.

A batch holds b images of each of N streams, the first image of every stream first: row `i * N + n` is image i of stream
n. So an activation (b * N, C, ...) is, without a copy, one of b rows and N * C channels (b, N * C, ...): batch and
group norm then run once, by their own forward, with N * C scales, shifts and statistics. What a part computes for a
layer of one stream is mapped over streams (`torch.func.vmap`), so that it is the same arithmetic as alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from poem.adapter import Adapter
from poem.engine.network import Network
from poem.engine.norm_layers import PLAIN_BATCH_NORMS, ForwardContext, PatchedNorm
from poem.engine.parameter_groups import HALF, Swap, swapped
from poem.engine.sample_rows import RowScaling
from poem.parts.base import Memory
from poem.parts.statistics import BatchLayer, FromBatch, Source, Statistics, moments
from poem.parts.stream_statistics import Blended
from poem.serve.stack_blended import blended_moments

MOST_CHANNELS = 65535
"""Blocks that one dimension of a CUDA grid may have; a kernel may take one for each channel."""
Rows = Mapping[str, Tensor]
"""A layer's `weight` and `bias`, a row (N, C) for each stream; what no stream has of its own is left out."""


@dataclass(frozen=True, repr=False)
class Grouped(Statistics):
    """A recipe's statistics for a batch of several streams: memory has a row for each stream in front."""

    inner: Statistics
    streams: int = 1

    @property
    def copies(self) -> int:
        """As alone."""
        return self.inner.copies

    @property
    def source_copy(self) -> int | None:
        """As alone."""
        return self.inner.source_copy

    def combine(self, logits: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """The copies' logits (copies, b * N, C) as one answer (b * N, C), each stream by its own memory."""
        own = {key: value for key, value in memory.items() if key.startswith("statistics.") and key.count(".") == 1}
        apart = logits.unflatten(1, (-1, self.streams))
        answer, record = vmap(self.inner.combine, in_dims=(2, 0), out_dims=(1, 0))(apart, own)
        return answer.flatten(0, 1), record

    def __call__(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        """Never asked: `StackedNorm` maps the inner part over streams."""
        raise RuntimeError("expected a stacked norm layer to ask the inner statistics")


class StackNetwork(Network):
    """A network whose adapted norm layers, and all batch norms, take a row of tensors for each of several streams.

    Args:
        adapter: Any stream's adapter: model, recipe and settings are those of all.
    """

    def __init__(self, adapter: Adapter) -> None:
        recipe, given, facts = adapter.recipe, adapter.settings, adapter.facts
        names = adapter.adapted
        branch = [name.removeprefix("branch.") for name in names if name.startswith("branch.")]
        split = None
        if recipe.branch is not None:
            split = given["split"] or facts.split(recipe.branch.depth)
        self.streams = 1
        """Of the pass under way."""
        self._memory: dict[str, Memory] = {}
        super().__init__(
            adapter.model,
            theta=[name for name in names if recipe.branch is None or not name.startswith("branch.")],
            branch=branch if recipe.branch is not None else None, split=split, norms=facts.norms,
            classes=given["classes"], mean=given["mean"], std=given["std"], logits=given["logits"],
            precision=given["precision"], per_sample=True,
        )  # fmt: skip
        for norm in self.norms:
            del norm.layer.__dict__["forward"]
        self.norms = [StackedNorm(each, self) for each in self.norms]
        for norm in self.norms:
            norm.patch()

    def stacked(
        self,
        images: Tensor,
        streams: int,
        theta: Tensor | None,
        branch: Tensor | None,
        statistics: Statistics,
        memory: Memory,
        mask: Tensor | None = None,
    ) -> tuple[tuple[Tensor, ...], ForwardContext]:
        """Logits (N, b, C) of each head, and what the pass recorded, with N in front.

        Args:
            images: (b * N, ...), the first image of every stream first.
            streams: N.
            theta: (N, P), or None for the source's own.
            branch: (N, Q), or None where there is none.
            statistics: Of the recipe.
            memory: Of all streams, N in front.
            mask: (N, b) samples whose statistics count; None for all.
        """
        self.streams, self._memory = streams, {}
        for name, value in memory.items():
            self._memory.setdefault(name.rpartition(".")[0], {})[name] = value
        flat = None if mask is None else mask.T.flatten()
        heads, run = self.heads(images, theta, branch, Grouped(statistics, streams), memory, flat, training=True)
        if run.source is not None:
            run.source = by_stream(run.source, streams)
        return tuple(by_stream(head, streams) for head in heads), run

    def memory_of(self, key: str) -> Memory:
        """What a layer of this name remembers, for all streams."""
        return self._memory.get(key, {})


def by_stream(rows: Tensor, streams: int) -> Tensor:
    """(N, b, ...) of rows (b * N, ...)."""
    apart: Tensor = rows.unflatten(0, (-1, streams))
    return apart.transpose(0, 1)


def in_rows(stacked: Tensor) -> Tensor:
    """Rows (b * N, ...) of (N, b, ...)."""
    return stacked.transpose(0, 1).flatten(0, 1)


class StackedNorm(PatchedNorm):
    """A norm layer of the twin for rows of several streams."""

    def __init__(self, norm: PatchedNorm, network: StackNetwork) -> None:
        super().__init__(norm.name, norm.layer, network._running, network.acceleration, swappable=norm.swappable)
        self._network = network
        self._scaling = RowScaling(norm.name, norm.layer)

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        """The layer with each stream's tensors, or on a doubled batch the source's on one half and theirs on the other.

        Raises:
            RuntimeError: The layer is called with more than its input, or runs before the split although it is beyond.
        """
        if len(args) != 1 or named:
            raise RuntimeError(f"expected the layer {self.name!r} to be called with its input alone")
        x, run = args[0], self._current()
        run.ran.add(self.name)
        if self.batch and not run.copied:
            run.copied = True
            x = torch.cat([x] * run.copies)
        branch = run.branch_rows.get(self.layer)
        if run.branch == "alone":
            key = f"branch.{self.key}" if branch else self.key
            return self._streams(x, run, key, branch or run.theta_rows.get(self.layer))
        if not run.doubled:
            if branch:
                raise RuntimeError(f"expected the layer {self.name!r} after the split, it ran before; pass split=")
            return self._streams(x, run, self.key, run.theta_rows.get(self.layer))
        source, adapted = x.chunk(2)
        first = self._streams(source, run, self.key, None)
        return torch.cat([first, self._streams(adapted, run, f"branch.{self.key}", branch)])

    def _streams(self, x: Tensor, run: ForwardContext, key: str, rows: Rows | None) -> Tensor:
        """One half, or all: each stream with its own scale, shift and statistics."""
        if not self.batch:
            return self.own(x) if rows is None else self._sample_norm(x, run, rows)
        inner = run.statistics.inner if isinstance(run.statistics, Grouped) else run.statistics
        streams = self._network.streams
        if type(inner) is Source:
            return self.own(x) if rows is None else self._folded(x, rows, (self.source_mean, self.source_var))
        if type(inner) is FromBatch and run.mask is None:
            alone = x.numel() == x.shape[1] * streams
            return self._folded(x, rows or {}, (self.source_mean, self.source_var) if alone else None)
        memory, own = self._network.memory_of(key), (self.source_mean, self.source_var)
        if type(inner) is Blended and run.mask is None and memory and own[0] is not None and own[1] is not None:
            given = tuple(each.float() if each.dtype in HALF else each for each in (own[0], own[1]))
            mean, var, new = blended_moments(inner, x, streams, (given[0], given[1]), memory, key)
        else:
            mean, var, new = self._moments(inner, x, run, key)
        run.record.update(new)
        return self._given_moments(x, mean, var, rows or {}, run.copies)

    def _moments(self, inner: Statistics, x: Tensor, run: ForwardContext, key: str) -> tuple[Tensor, Tensor, Memory]:
        """Mean and variance (N, C), or (N, copies, C), that the part chooses for each stream, and its new memory."""
        streams = self._network.streams
        memory = self._network.memory_of(key)
        mask = None if run.mask is None else run.mask.unflatten(0, (-1, streams))

        def of_one(x: Tensor, mask: Tensor | None, memory: Memory) -> tuple[Tensor, Tensor, Memory]:
            chosen = _Chosen(self)
            _, new = inner.normalised(chosen, x, mask, memory, key)
            return *chosen.moments, new

        dims = (1, None if mask is None else 1, 0)
        found: tuple[Tensor, Tensor, Memory] = vmap(of_one, in_dims=dims)(x.unflatten(0, (-1, streams)), mask, memory)
        return found

    def _given_moments(self, x: Tensor, mean: Tensor, var: Tensor, rows: Rows, copies: int) -> Tensor:
        """The layer with these statistics of each stream."""
        layer: Any = self.layer
        mean, var = (each if each.dim() == 3 else each[:, None] for each in (mean, var))  # (N, 1 or copies, C)
        apart = x.unflatten(0, (mean.shape[1], -1, self._network.streams))
        ones = [1] * (x.dim() - 2)

        def along(each: Tensor) -> Tensor:
            return each.transpose(0, 1).reshape(each.shape[1], 1, each.shape[0], each.shape[2], *ones)

        scale = (var + layer.eps).rsqrt()
        if type(layer) in PLAIN_BATCH_NORMS:
            weight, bias = (rows.get(name, layer._parameters[name]) for name in ("weight", "bias"))
            scale = scale if weight is None else scale * (weight[:, None] if weight.dim() == 2 else weight)
            shift = -mean * scale
            shift = shift if bias is None else shift + (bias[:, None] if bias.dim() == 2 else bias)
            return torch.addcmul(along(shift), apart, along(scale)).to(x.dtype).flatten(0, 2)
        normal = ((apart - along(mean)) * along(scale)).to(x.dtype).flatten(0, 2)
        neutral = mean.new_zeros(mean.shape[-1]), mean.new_full((mean.shape[-1],), 1 - layer.eps)
        return self._folded(normal, rows, neutral)

    def _folded(self, x: Tensor, rows: Rows, given: tuple[Tensor | None, Tensor | None] | None) -> Tensor:
        """The batch norm's own forward on N * C channels, with statistics (C,) for every stream, or the batch's."""
        streams, buffers = self._network.streams, self.layer._buffers
        wide = x.reshape(-1, streams * x.shape[1], *x.shape[2:])
        if given is None and len(wide) == 1 and type(self.layer) in PLAIN_BATCH_NORMS and x.dtype not in HALF:
            return self._of_single_images(wide, rows).reshape(x.shape)
        before = dict(buffers)
        flags = {} if given is not None else {"training": True, "track_running_stats": False}
        if given is not None and given[0] is not None and given[1] is not None:
            kinds = [
                each if buffers.get(name) is None else buffers[name] for name, each in zip(_MOMENTS, given, strict=True)
            ]
            for name, each, like in zip(_MOMENTS, given, kinds, strict=True):
                buffers[name] = each.to(like.dtype).repeat(streams)  # type: ignore[union-attr]
        try:
            with swapped(self._wide(rows)), _set(self.layer, flags), _without_cudnn(wide):
                return self.own(wide).reshape(x.shape)
        finally:
            buffers.update(before)

    def _of_single_images(self, wide: Tensor, rows: Rows) -> Tensor:
        """Batch norm where every stream has one image (1, N * C, ...): a group norm in which each channel is a group.

        The same arithmetic; batch norm's kernels are slow on a batch of one with tens of thousands of channels. Group
        norm's backward has as many blocks along one dimension of its grid as there are groups: where those are too
        many, streams are its samples, and since it scales all samples alike, the scale follows.
        """
        layer: Any = self.layer
        scaled = {name: tensor for _, name, tensor in self._wide(rows)}
        if scaled and wide.shape[1] <= MOST_CHANNELS:
            return F.group_norm(wide, wide.shape[1], scaled["weight"], scaled.get("bias"), layer.eps)
        apart = wide.reshape(self._network.streams, -1, *wide.shape[2:])
        normal = F.group_norm(apart, apart.shape[1], None, None, layer.eps)
        if not scaled:
            return normal
        shape = (*apart.shape[:2], *[1] * (apart.dim() - 2))
        weight, bias = scaled["weight"].view(shape), scaled.get("bias")
        return normal * weight if bias is None else torch.addcmul(bias.view(shape), normal, weight)

    def _sample_norm(self, x: Tensor, run: ForwardContext, rows: Rows) -> Tensor:
        """A layer that normalises each sample alone, with each stream's scale and shift."""
        layer: Any = self.layer
        streams, samples = self._network.streams, run.rows
        if isinstance(layer, nn.GroupNorm) and len(x) == samples and x.shape[1] == layer.num_channels:
            wide = x.reshape(-1, streams * x.shape[1], *x.shape[2:])
            many = {"num_groups": layer.num_groups * streams, "num_channels": layer.num_channels * streams}
            with swapped(self._wide(rows)), _set(layer, many):
                return self.own(wide).reshape(x.shape)
        if type(layer) is nn.LayerNorm and len(x) % samples == 0:
            shape = layer.normalized_shape
            normal = F.layer_norm(x, shape, None, None, layer.eps)
            apart = normal.unflatten(0, (-1, streams, len(x) // samples))
            ones = [1] * (x.dim() - len(shape))
            weight, bias = (
                each.reshape(-1, *ones, *shape) if each is not None and each.dim() > len(shape) else each
                for each in (rows.get(name, layer._parameters[name]) for name in ("weight", "bias"))
            )
            if weight is not None:
                apart = apart * weight if bias is None else torch.addcmul(bias, apart, weight)
            scaled: Tensor = apart.to(x.dtype).flatten(0, 2)
            return scaled
        each = {name: value.repeat(samples // streams, *[1] * (value.dim() - 1)) for name, value in rows.items()}
        return self._scaling(each, 1, lambda: self.own(x))

    def _wide(self, rows: Rows) -> list[Swap]:
        """Scales and shifts of all streams one after another, in the layer's place."""
        return [
            (self.layer, name, rows[name].reshape(-1) if name in rows else own.repeat(self._network.streams))
            for name, own in self.layer._parameters.items()
            if own is not None
        ]


_MOMENTS = ("running_mean", "running_var")


class _Chosen:
    """The layer as a part sees it that is asked for one stream: what it would be normalised with is noted."""

    def __init__(self, layer: StackedNorm) -> None:
        self._layer = layer
        self.moments: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    @property
    def source_mean(self) -> Tensor | None:
        """The running mean that came with the model."""
        return self._layer.source_mean

    @property
    def source_var(self) -> Tensor | None:
        """The running variance that came with the model."""
        return self._layer.source_var

    @property
    def learning(self) -> bool:
        """Whether the pass under way is learnt from."""
        return self._layer.learning

    def with_source(self, x: Tensor) -> Tensor:
        """The source's."""
        assert self.source_mean is not None
        assert self.source_var is not None
        return self.with_moments(x, self.source_mean, self.source_var)

    def with_batch(self, x: Tensor) -> Tensor:
        """Those of `x`."""
        return self.with_moments(x, *moments(x, None))

    def with_moments(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """These."""
        self.moments = mean, var
        return x


@contextmanager
def _without_cudnn(wide: Tensor) -> Iterator[None]:
    """Torch's own batch norm where there are more channels than one dimension of a grid may have blocks."""
    before = torch.backends.cudnn.enabled
    if not wide.is_cuda or wide.shape[1] <= MOST_CHANNELS:
        yield
        return
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


@contextmanager
def _set(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Attributes of a module, until the block ends."""
    before = {name: getattr(module, name) for name in values}
    module.__dict__.update(values)
    try:
        yield
    finally:
        module.__dict__.update(before)
