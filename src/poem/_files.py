"""Files that are written whole or not at all; and states as files: safetensors, never unpickled."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SCHEMA = 2


def write_whole(path: Path, content: str | bytes, *, beside: Path | None = None, sync: bool = True) -> None:
    """A file appears with all of its content or not at all, whatever happens on the way.

    Args:
        path: Its place; folders above are made.
        content: Text in UTF-8, or bytes.
        beside: Where it is written before it is moved; by default a hidden file next to its place.
        sync: Whether it must outlive a power cut the moment it is there. Thousands of small files are faster without.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}") if beside is None else beside
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def save(state: dict[str, Any], path: Path) -> None:
    """Write a state beside its place, then move it there."""
    from safetensors.torch import save as to_bytes

    tensors = {**{key: value.contiguous().cpu() for key, value in state["tensors"].items()}, "rng": state["rng"]}
    rest = {key: value for key, value in state.items() if key not in ("tensors", "rng")}
    write_whole(path, to_bytes(tensors, metadata={"poem": json.dumps(rest)}))


def load(path: Path) -> dict[str, Any]:
    """Read a state; refuses files that `save` did not write."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            rest = json.loads((file.metadata() or {}).get("poem", "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dictionary
    except SafetensorError as error:
        raise ValueError(f"expected a state written by adapter.save, got {path}: {error}") from error
    if rest is None:
        raise ValueError(f"expected a state written by adapter.save, got {path}, which lacks its description")
    rng = tensors.pop("rng")
    return {**rest, "rng": rng, "tensors": tensors}


def fingerprint(*tensors: Tensor) -> str:
    """A short hash of exact values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
