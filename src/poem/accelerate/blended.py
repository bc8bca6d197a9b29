"""`Blended` statistics by Triton kernels, where no gradient is wanted: three kernels a layer instead of dozens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from poem.accelerate.lazy_norm import LazyNorms
from poem.accelerate.triton_kernels import TritonKernels
from poem.engine.norm_layers import ForwardContext, PatchedNorm
from poem.parts.base import Memory
from poem.parts.stream_statistics import FORGET, LARGEST_JUMP, Blended

DEVICES: tuple[str, ...] = ("cuda",)  # that have kernels
FORWARD = nn.BatchNorm2d.forward  # torch's own, whatever is put in its place later
KINDS = (torch.bfloat16, torch.float32)
SAMPLES = 65_535  # the largest grid that CUDA takes in that direction
SUMS = 2**29  # that are counted in 32 bits


def _trial(side: int, *, masked: bool) -> Callable[[torch.device], object]:
    """Two copies of an image of so many rows."""

    def call(device: torch.device) -> object:
        x = torch.zeros(2, 8, side, side, dtype=torch.bfloat16, device=device)
        x = x.contiguous(memory_format=torch.channels_last)
        zeros, one = torch.zeros(2, 8, device=device), torch.ones(8, device=device)
        held = dict.fromkeys(kernels().MOMENTS, zeros) | dict.fromkeys((*kernels().SETTINGS, "share"), zeros[:1, :2].mT)
        held = {name: tensor.contiguous() for name, tensor in held.items()} | {"images": zeros[0, 0]}
        mask = torch.ones(1, dtype=torch.bool, device=device) if masked else None
        constants = {"eps": 1e-5, "source_images": 1.0, "forget": FORGET, "largest_jump": LARGEST_JUMP}
        new, _ = kernels().remembered(x, mask, held, (one, one), (one, one), **constants)
        return [kernels().scaled(x, new, 2, relu=True, other=other) for other in (None, x)]

    return call


TRITON = TritonKernels(
    "statistics of the stream", ("blended_kernels",), [_trial(2, masked=True), _trial(64, masked=False)]
)


def kernels() -> Any:
    """The kernels, or None where Triton is not installed, or is broken."""
    return TRITON.modules and TRITON.modules[0]


def fusable(norm: PatchedNorm, x: Tensor, mask: Tensor | None, copies: int) -> bool:
    """Whether our kernels take the layer and its input.

    An ordinary `nn.BatchNorm2d` with scale, shift and the source's statistics, on a GPU; half or single precision, four
    dimensions, channels last, whole copies; and no gradient is wanted.
    """
    layer: Any = norm.layer
    if type(layer) is not nn.BatchNorm2d or getattr(norm.own, "__func__", None) is not FORWARD:
        return False
    if x.device.type not in DEVICES or x.dtype not in KINDS or x.dim() != 4:
        return False
    if x.numel() == 0 or not x.is_contiguous(memory_format=torch.channels_last) or len(x) % copies:
        return False
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (len(x) // copies,) or mask.device != x.device):
        return False
    given = (layer.weight, layer.bias, norm.source_mean, norm.source_var)
    tensors = [each for each in given if isinstance(each, Tensor) and each.shape == x.shape[1:2]]
    if len(tensors) < len(given) or any(each.dtype not in KINDS or each.device != x.device for each in tensors):
        return False
    learnt = torch.is_grad_enabled() and any(each.requires_grad for each in (x, *tensors))
    few = len(x) <= SAMPLES and len(x) * x.shape[1] < SUMS and x.numel() // copies < 2**31
    return not learnt and few and TRITON.work(x.device)


def fused(
    norm: PatchedNorm, x: Tensor, context: ForwardContext, key: str, lazy: LazyNorms | None = None
) -> tuple[Tensor, Memory] | None:
    """The layer's output with `Blended` statistics by our kernels, and its memory moved by the batch, or None.

    Precondition: `fusable`, and the layer's memory is in single precision. Fallback: the part itself.
    """
    statistics, mask, memory = context.statistics, context.mask, context.memory
    if type(statistics) is not Blended or not fusable(norm, x, mask, statistics.copies):
        return None
    names = (*kernels().MOMENTS, *kernels().SETTINGS, "share", "images")
    held = {name: memory.get(f"{key}.{name}") for name in names}
    known = {name: tensor.contiguous() for name, tensor in held.items() if tensor is not None and _suits(tensor, x)}
    if len(known) < len(held) or known["mean"].shape != (statistics.copies, x.shape[1]):
        return None
    assert norm.source_mean is not None
    assert norm.source_var is not None
    x = x.detach()
    scales, new = kernels().remembered(
        x, None if mask is None else mask.contiguous(), known,
        (norm.source_mean.contiguous(), norm.source_var.contiguous()), norm.affine(),
        eps=float(norm.layer.eps), source_images=float(statistics.source_images),  # type: ignore[arg-type]
        forget=FORGET, largest_jump=LARGEST_JUMP,
    )  # fmt: skip

    def run(other: Tensor | None, relu: bool) -> Tensor:
        y: Tensor = kernels().scaled(x, scales, statistics.copies, relu=relu, other=other)
        return y

    wait = lazy is not None and not torch.is_grad_enabled()  # what is added could want a gradient
    y = lazy(run, x) if lazy is not None and wait else run(None, False)
    return y, {f"{key}.{name}": tensor for name, tensor in new.items()}


def _suits(tensor: Tensor, x: Tensor) -> bool:
    """Whether a tensor of the memory is as the kernels read it."""
    return tensor.dtype == torch.float32 and tensor.device == x.device
