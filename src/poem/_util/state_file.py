"""The state of an adapter, tensors and plain values, as a safetensors file; nothing is pickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from poem._util.files import write_atomic

SCHEMA = 3
"""Version of the format; it is stored in every state."""


def save_state(state: dict[str, Any], path: Path) -> None:
    """Write a state atomically: its tensors, and all else as JSON in the metadata."""
    from safetensors.torch import save as to_bytes

    tensors = {**{key: value.contiguous().cpu() for key, value in state["tensors"].items()}, "rng": state["rng"]}
    rest = {key: value for key, value in state.items() if key not in ("tensors", "rng")}
    write_atomic(path, to_bytes(tensors, metadata={"poem": json.dumps(rest)}))


def load_state(path: Path) -> dict[str, Any]:
    """Read a state; a file that `save_state` did not write is a `ValueError`."""
    from safetensors import SafetensorError, safe_open

    if path.exists() and not path.is_file():
        raise ValueError(f"expected a state written by adapter.save, got {path}, which is no regular file")
    try:
        with safe_open(str(path), framework="pt") as file:
            rest = json.loads((file.metadata() or {}).get("poem", "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dictionary
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"expected a state written by adapter.save, got {path}: {error}") from error
    if not isinstance(rest, dict) or "rng" not in tensors:
        raise ValueError(f"expected a state written by adapter.save, got {path}, which lacks its description")
    rng = tensors.pop("rng")
    return {**rest, "rng": rng, "tensors": tensors}
