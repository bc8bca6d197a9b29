"""States as files: safetensors, written whole or not at all, never unpickled."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SCHEMA = 1


def save(state: dict[str, Any], path: Path) -> None:
    """Write a state beside its place, then move it there."""
    from safetensors.torch import save as to_bytes

    tensors = {**{key: value.contiguous().cpu() for key, value in state["tensors"].items()}, "rng": state["rng"]}
    rest = {key: value for key, value in state.items() if key not in ("tensors", "rng")}
    whole = to_bytes(tensors, metadata={"poem": json.dumps(rest)})
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(whole)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


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
