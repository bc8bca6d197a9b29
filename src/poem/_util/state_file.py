"""The state of an adapter, tensors and plain values, as a safetensors file; nothing is pickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from poem._util.files import write_atomic

SCHEMA = 3
"""Version of the format; it is stored in every state."""
MAX_HEADER = 100_000_000
"""Bytes of a safetensors header, at most; the library's own limit."""


def state_bytes(state: dict[str, Any]) -> bytes:
    """A state as the bytes of a safetensors file: its tensors, and all else as JSON in the metadata.

    Written from NumPy arrays where NumPy has the types: `safetensors.torch` makes a ctypes type for every length of a
    tensor, which Python keeps for ever, and the guard's memory has another length each time. The bytes are the same.
    """
    from safetensors.numpy import save as from_arrays
    from safetensors.torch import save as from_tensors

    tensors = {**{key: value.contiguous().cpu() for key, value in state["tensors"].items()}, "rng": state["rng"]}
    rest = {key: value for key, value in state.items() if key not in ("tensors", "rng")}
    about = {"poem": json.dumps(rest)}
    try:
        arrays = {key: value.detach().numpy() for key, value in tensors.items()}
    except TypeError:  # such as bfloat16
        return bytes(from_tensors(tensors, metadata=about))
    return bytes(from_arrays(arrays, metadata=about))


def save_state(state: dict[str, Any], path: Path) -> None:
    """Write a state atomically: its tensors, and all else as JSON in the metadata."""
    write_atomic(path, state_bytes(state))


def load_state(path: Path) -> dict[str, Any]:
    """Read a state; a file that `save_state` did not write is a `ValueError`.

    The file is read as bytes: `safe_open(...).get_tensor` of safetensors 0.8 never frees what it returned, so that a
    process that reads states again and again would keep all of them.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"expected a state written by adapter.save, got {path}, which is no regular file")
    return _parsed(path.read_bytes(), str(path))


def read_state(content: bytes) -> dict[str, Any]:
    """Read a state from the bytes of a file that `save_state` wrote; any others are a `ValueError`."""
    return _parsed(content, "other bytes")


def _parsed(content: bytes, where: str) -> dict[str, Any]:
    """The state of a file's bytes."""
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    try:
        size = int.from_bytes(content[:8], "little")
        if len(content) < 8 or size > min(len(content) - 8, MAX_HEADER):
            raise ValueError("its header is longer than the file")
        rest = json.loads(json.loads(content[8 : 8 + size]).get("__metadata__", {}).get("poem", "null"))
        tensors = from_bytes(content)
    except (SafetensorError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"expected a state written by adapter.save, got {where}: {error}") from error
    return _joined(rest, tensors, where)


def _joined(rest: Any, tensors: dict[str, Any], where: str) -> dict[str, Any]:
    """The state of a file's plain values and tensors."""
    if not isinstance(rest, dict) or "rng" not in tensors:
        raise ValueError(f"expected a state written by adapter.save, got {where}, which lacks its description")
    rng = tensors.pop("rng")
    return {**rest, "rng": rng, "tensors": tensors}
