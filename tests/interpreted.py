"""Triton's interpreter, as near to a GPU as tests need it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


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
