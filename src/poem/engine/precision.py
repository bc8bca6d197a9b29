"""The precision that the network computes in: our own autocast, and TF32 switched on while a network runs."""

from __future__ import annotations

import threading
from typing import Literal, get_args

import torch
from torch import nn

from poem.engine.parameter_groups import HALF

Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS = get_args(Precision)

_LOCK = threading.Lock()
_TF32: dict[int, tuple[bool, bool]] = {}  # the switches as they were, for each network that has them on


def enter_tf32(network: object) -> None:
    """TF32 in products and convolutions, forward and backward, until the last network of any thread leaves."""
    with _LOCK:
        now = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        _TF32[id(network)] = next(iter(_TF32.values()), now)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def leave_tf32(network: object) -> None:
    """The switches as they were, if no other network has them on; a second call does nothing."""
    with _LOCK:
        before = _TF32.pop(id(network), None)
        if before is not None and not _TF32:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


class Autocast:
    """The caller's autocast, noted before it is switched off, and the one that the network runs under."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.caller: tuple[bool, torch.dtype] = (False, torch.bfloat16)

    def note(self, device: str) -> None:
        """Note the caller's autocast, which a pass and its capture depend on."""
        self.caller = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def context(self, device: str) -> torch.autocast:
        """The network's autocast, without the caller's cache, which would hold on to weights that have changed."""
        enabled, dtype = (True, torch.bfloat16) if self.precision == "bf16" else self.caller
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)

    def coarse(self, model: nn.Module, *, cuda: bool) -> bool:
        """Whether the network computes in less than single precision, so that equal passes differ visibly."""
        tf32 = cuda and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
        half = self.caller[0] or next(model.parameters()).dtype in HALF
        return self.precision != "fp32" or tf32 or half
