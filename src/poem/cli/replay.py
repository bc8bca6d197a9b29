"""Examples:
poem predict photos/ --method tent --guard --audit audit.jsonl
poem replay audit.jsonl photos/
poem replay audit.jsonl photos/ --model mypackage.nets:build --weights mine.pth
poem replay audit.jsonl images.npy --model digits-bn
poem replay audit.jsonl photos/ --method mypackage.methods:mine

Repeats the guarded run that an audit records, batch by batch, on the same images. Whether a batch is learnt from is
taken from the audit, because it may have depended on time; everything else is computed again and compared bit for bit:
images, signals, verdicts, events and answers. Prints that all batches are identical, or the first that differs and in
what, with exit status 1.

The data is the folder that poem predict was run on; order, size and crop come from the audit. Or it is a .npy or
.safetensors file of images (N, C, H, W) in the order of the run, for runs from Python: as the adapter got them, or as
uint8, which is divided by 255.

An audit may be a stranger's, so no module is imported that only the audit names. A method with parts of your own is
named by --method: its parts may then occur in the recipe, whose settings come from the audit.

On a CPU the number of threads is set to that of the run, because sums depend on it in the last bits. On CUDA both runs
need torch.use_deterministic_algorithms(True). Other versions of torch and other machines may differ in the last bits;
where a batch differs, what is known of the machine is said too.
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poem.cli import _option_checks as checks
from poem.cli._option_checks import path_argument

if TYPE_CHECKING:
    from torch import Tensor, nn

    from poem.guarded.guard import Guard
    from poem.recipes.recipe import Recipe

TENSORS = (".npy", ".safetensors")
"""Endings of files of images; nothing is unpickled."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("audit", type=path_argument, help="the file of poem predict --audit, or of poem.guard(audit=)")
    parser.add_argument(
        "images",
        metavar="data",
        type=path_argument,
        help="the folder of images, or a .npy or .safetensors file of them",
    )
    parser.add_argument("--model", help="as of poem predict; default: the base that the audit names")
    parser.add_argument("--weights", help="as of poem predict; default: those that the audit names")
    parser.add_argument(
        "--method", help="package.module:name of the run's method, if it has parts of your own; its module is imported"
    )
    parser.add_argument("--device", help="default: that of the run")


def run(args: argparse.Namespace) -> int:
    """Repeat the run and print what came out; returns 1 if a batch, or what the run was made with, differs."""
    import torch

    from poem.cli.predict import open_model
    from poem.guarded.audit import read_audit
    from poem.guarded.replay import recorded_steps, refuse_compiled, replay
    from poem.recipes.methods import recipe as named_recipe

    if not args.audit.is_file():
        raise FileNotFoundError(f"expected the file of poem predict --audit, got {args.audit}, which is no file")
    if not args.images.is_dir() and not (args.images.is_file() and args.images.suffix in TENSORS):
        raise FileNotFoundError(
            f"expected a folder of images, or a file of them that ends in {' or '.join(TENSORS)}, got {args.images}"
        )
    header, lines = read_audit(args.audit)
    refuse_compiled(args.audit, header, lines)
    about = header.get("run", {})
    if not isinstance(about, dict):
        raise ValueError(f"expected an audit written by a guard, got {args.audit}, whose run is no object")
    device = _device(args.device, header, about)
    name, weights = _model_name(args, about)
    method = None if args.method is None else named_recipe(args.method)
    if args.images.is_dir():
        batches = _folder_batches(args.images, about, args.audit, device)
    else:
        counts = [step.get("count") for step in recorded_steps(lines) if step["kind"] == "batch"]
        batches = _file_batches(_open_images(args.images), counts, device)
    _same_torch_settings(header, device)
    # The header's mean and std are used; these keep `open_model` from asking for some.
    stated: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)} if ":" in name else {}
    model, _, _ = open_model(name, weights, device=device, **stated)
    guard = _guard(model, header, args.audit, method)
    _log(f"{name}, {header.get('method')}, guarded; torch {torch.__version__} on {device}")
    found = replay(args.audit, guard, batches)
    print(found)
    return 0 if found.identical else 1


def _model_name(args: argparse.Namespace, about: dict[str, Any]) -> tuple[str, str | None]:
    """The model and weights to open. A function is imported only if the user names it: an audit may be a stranger's."""
    recorded, weights = about.get("model"), about.get("weights")
    name = args.model or recorded
    if not isinstance(name, str):
        raise ValueError(f"expected --model NAME: {args.audit} does not say which model it records")
    if args.model is None and ":" in name:
        raise ValueError(f"expected --model, since the run's was imported; if you trust it, type: --model {name}")
    if args.weights is None and args.model in (None, recorded) and isinstance(weights, str):
        return name, weights
    return name, args.weights


def _device(asked: str | None, header: dict[str, Any], about: dict[str, Any]) -> str:
    """The device to run on: that of the run, where this machine has it."""
    recorded = str(about.get("device", header.get("device", "cpu")))
    try:
        return checks.check_devices(asked or recorded)[0]
    except ValueError:
        if asked is not None:
            raise
        _log(f"the run was made on {recorded}, which is not here: repeated on the CPU, bits will differ")
        return "cpu"


def _same_torch_settings(header: dict[str, Any], device: str) -> None:
    """Set the number of threads and the choice of algorithms to those of the run."""
    import torch

    from poem._util.limits import MAX_PROCESSES

    threads = header.get("threads")
    if device == "cpu" and isinstance(threads, int) and 1 <= threads <= MAX_PROCESSES:
        torch.set_num_threads(threads)
    if header.get("deterministic") is True:
        torch.use_deterministic_algorithms(True)


def _guard(model: nn.Module, header: dict[str, Any], audit: Path, method: Recipe | None = None) -> Guard:
    """A fresh guard with the recipe and the settings that a header states, and nothing else of it.

    Parts of other packages are taken from the method that the user has named.
    """
    from poem.api import adapt
    from poem.guarded.settings import GuardSettings

    try:
        strange = [name for name in header["guard"] if name not in GuardSettings.__dataclass_fields__]
        if strange:
            raise ValueError(
                f"expected an audit of this version, got {audit}, whose guard has a setting {strange[0]!r}"
            )
        recipe = _recipe(dict(header["recipe"]), header.get("method"), method)
        settings = {name: header[name] for name in ("batch_size", "mean", "std", "seed", "precision", "split")}
        return adapt(model, recipe, classes=header["mask"], guard=dict(header["guard"]), **settings)
    except KeyError as error:
        raise ValueError(f"expected an audit written by a guard, got {audit}, whose header lacks {error}") from error


def _recipe(fields: dict[str, Any], name: Any, method: Recipe | None) -> Recipe:
    """The recipe of a header; parts of other packages are those of `method`, which the user has named.

    Raises:
        UnannouncedPartError: It has others; the message says what to type.
    """
    from poem.recipes.text import UnannouncedPartError, part_paths, read

    try:
        return read(fields, trusted=False if method is None else part_paths(method))
    except UnannouncedPartError as error:
        known = f"{name}, if you trust it" if isinstance(name, str) and ":" in name else "package.module:name"
        raise UnannouncedPartError(f"{error}; name the method that has this part, type: --method {known}") from error


def _folder_batches(folder: Path, about: dict[str, Any], audit: Path, device: str) -> Iterator[Tensor]:
    """The images of a folder as `poem predict` hands them to the adapter."""
    import random

    from poem.predict import find_images, read_batches
    from poem.streams.loading.prepare import Prepare

    try:
        size, shuffle, prepare = int(about["batch_size"]), about["shuffle"], Prepare(**about["prepare"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"expected an audit of poem predict for a folder, got {audit}, which does not say how images were read; "
            f"hand in the images of the run as one file that ends in {' or '.join(TENSORS)}"
        ) from error
    if size < 1:
        raise ValueError(f"expected an audit written by poem predict, got {audit}, with batches of {size} images")
    files = find_images(folder)
    if about.get("files") != len(files):
        _log(f"{len(files)} images under {folder}; the run had {about.get('files')}")
    if shuffle is not None:
        random.Random(shuffle).shuffle(files)
    return (images.to(device) for images in read_batches(files, prepare, folder, size))


def _open_images(path: Path) -> Any:
    """The images (N, C, H, W) of a file: an array on the disk, or a tensor."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".npy":
            images: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            (images,) = load_file(path).values()
    except (ValueError, EOFError, SafetensorError) as error:
        raise ValueError(f"expected one array of images in {path}: {error}") from error
    if images.ndim != 4:
        raise ValueError(f"expected images (N, C, H, W) in {path}, got a shape of {tuple(images.shape)}")
    return images


def _file_batches(images: Any, counts: list[Any], device: str) -> Iterator[Tensor]:
    """The images of a file in batches of the recorded sizes, and what is left after them."""
    import torch

    at = 0
    for count in [*counts, len(images)]:
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"expected the number of images of each batch in the audit, got {count!r}")
        piece = images[at : at + count]
        if len(piece) == 0:
            return
        batch = piece if isinstance(piece, torch.Tensor) else torch.from_numpy(piece.copy())
        at += count
        yield (batch.float() / 255 if batch.dtype == torch.uint8 else batch).to(device)


def _log(line: str) -> None:
    """Print to standard error, so that piped output stays clean."""
    print(line, file=sys.stderr)
