"""Triton's interpreter, as near to a GPU as tests need it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def triton_or_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton, whose interpreter from now on reads a number from an array of one.

    Up to Triton 3.6 it does so by `int`, which numpy refuses since 2.4; with both, kernels fail at every loop over a
    number that was computed or given, and the library, which tries them first, would leave them out.
    """
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return

    from triton.runtime import interpreter

    own = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        own(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on it rounds to half precision as a GPU does; by itself it cuts digits off."""
    import triton.language as tl
    from triton.runtime import interpreter

    cuts = interpreter.InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, kind: Any) -> Any:
        if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return cuts(self, source, kind)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16).view(torch.int16).numpy()
        return interpreter.TensorHandle(rounded.view(np.uint16).reshape(source.data.shape), kind.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
