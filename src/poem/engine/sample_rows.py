"""A norm layer whose scale and shift have a row for each sample, so that autograd returns each sample's gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from poem.engine.parameter_groups import HALF, Swap, swapped
from poem.parts.base import Memory
from poem.parts.statistics import BatchLayer, Statistics, moments

SampleRows = Mapping[str, Tensor]
"""A layer's `weight` and `bias` with a row for each sample, (B, C); what is not adapted is left out."""


@dataclass(frozen=True, repr=False)
class ConstantMoments(Statistics):
    """The batch's statistics without a gradient: a sample's output then depends on no other sample's rows.

    Layers that never tracked statistics have these too, which the source's would not.
    """

    def __call__(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        """The layer with the batch's mean and biased variance as constants."""
        return layer.with_moments(x, *moments(x.detach(), mask))


class RowScaling:
    """Runs a norm layer with neutral scale and shift, then scales and shifts each sample by its own row."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self._name, self._layer = name, layer
        self._axes: dict[int, int] = {}  # along which axis the layer scales an input of so many axes, where tried

    def __call__(self, rows: SampleRows, copies: int, normalised: Callable[[], Tensor]) -> Tensor:
        """The output of `normalised`, which runs the layer, with each sample's own scale and shift.

        An input with several rows per sample has them in a row (windows, tokens), copies of the batch one after
        another.

        Raises:
            ValueError: The input's rows are no multiple of the samples, or the layer does more than to scale and shift.
        """
        own = {key: tensor for key, tensor in self._layer._parameters.items() if tensor is not None}
        with swapped(self._affine(1.0, 0.0)):
            y = normalised()
        axis, count = self._axis(y, normalised), len(next(iter(rows.values())))
        times, left = divmod(len(y), copies * count)
        if left:
            raise ValueError(
                f"expected {copies * count} rows, or a multiple, in the layer {self._name!r}, got {len(y)}: samples "
                "cannot be told apart there; leave out Clipped(), as in step=SGD()"
            )

        def along(name: str) -> Tensor:
            each = rows.get(name)
            each = own[name].expand(count, *own[name].shape) if each is None else each
            each = each.repeat_interleave(times, 0) if times > 1 else each
            each = each.repeat(copies, *[1] * (each.dim() - 1)) if copies > 1 else each
            ones = y.dim() - axis - each.dim() + 1
            return each.reshape(len(y), *[1] * (axis - 1), *each.shape[1:], *[1] * ones)

        scaled = y * along("weight") if "weight" in own else y
        return (scaled + along("bias") if "bias" in own else scaled).to(y.dtype)

    def _axis(self, output: Tensor, normalised: Callable[[], Tensor]) -> int:
        """The first axis of the output that the layer scales along, found by trying; known for inputs of this kind.

        Raises:
            ValueError: The layer does more than to scale and shift.
        """
        if output.dim() in self._axes:
            return self._axes[output.dim()]
        layer: Any = self._layer
        shape = next(tensor.shape for tensor in layer._parameters.values() if tensor is not None)
        fits = [
            axis
            for axis in (1, output.dim() - len(shape))
            if axis > 0 and output.shape[axis : axis + len(shape)] == shape
        ]
        with torch.no_grad():
            probe = self._affine((1.0, 2.0), (-1.0, 1.0))
            with swapped(probe):
                expected = normalised()
            values = {key: tensor for _, key, tensor in probe}
            for axis in fits:
                view = (*shape, *[1] * (output.dim() - axis - len(shape)))
                tried = output.detach()
                tried = tried * values["weight"].view(view) if "weight" in values else tried
                tried = tried + values["bias"].view(view) if "bias" in values else tried
                close = 5e-2 if expected.dtype in HALF else 1e-3
                if torch.allclose(tried.to(expected.dtype), expected, rtol=close, atol=close, equal_nan=True):
                    if expected.isfinite().all():
                        self._axes[output.dim()] = axis
                    return axis
        raise ValueError(
            f"Clipped() needs norm layers that scale and shift and do no more, got {self._name!r} "
            f"({type(self._layer).__name__}); leave the clipping out, as in step=SGD()"
        )

    def _affine(self, scale: float | tuple[float, float], shift: float | tuple[float, float]) -> list[Swap]:
        """Scales and shifts to put into the layer: all the same, or evenly from the first number to the second."""
        found: list[Swap] = []
        for key, number in (("weight", scale), ("bias", shift)):
            tensor = self._layer._parameters.get(key)
            if tensor is not None:
                pair = number if isinstance(number, tuple) else (number, number)
                line = torch.linspace(*pair, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
                found.append((self._layer, key, line.view(tensor.shape)))
        return found
