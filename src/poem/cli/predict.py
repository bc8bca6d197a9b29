"""Examples:
poem predict photos/ -o predictions.csv
poem predict frames/ --model digits-bn --method tent --batch-size 32
poem predict photos/ --model mypackage.nets:build --mean 0.5 --std 0.5 --crop 224
poem predict photos/ --model torchvision.models:resnet18 --weights resnet18.pth --crop 224 --mean ... --std ...
poem predict val/ --classes folders --shuffle 0

Answers are kept in predictions.partial.csv while it runs. Run the same command again to go on after a stop: images that
are answered are not read again, what was learnt from them is loaded, and the result is that of a run without a stop.

A row of predictions.csv is a file; its columns:
file             below the folder given
label, name      the answer: the class's index (with --classes its place in that list), and what it is called
class_index      the answer in the model's own numbering, with --classes too
wnid             ImageNet's name of the class, where the classes are known to be ImageNet's
confidence       probability of the label, 0 to 1
entropy          of the answer, in nats; first_entropy: before the batch was learnt from
source_label, source_name, source_entropy
                 what the model says unadapted
taught           whether the model learnt from the image
newly_reliable   too uncertain at the first look, reliable at a later one
error            why there is no answer
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poem.cli import _values
from poem.cli._values import named_path, triple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from poem.predict import Answer
    from poem.zoo import Triple


EVERY = 10.0
"""Seconds between two lines of progress, where there is no terminal."""


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("folder", type=named_path, help="images, at any depth; in order of their names")
    parser.add_argument(
        "--model", default="effnet-lite0", help="a base (`poem list bases`), or package.module:function"
    )
    parser.add_argument(
        "--weights",
        help="a file or folder with the base's weights; for package.module:function a .pth or .safetensors file",
    )
    parser.add_argument("--method", default="poem", help="a name that `poem list` prints; default: poem")
    parser.add_argument(
        "-o", "--out", type=named_path, default=Path("predictions.csv"), help="default: predictions.csv"
    )
    parser.add_argument("--restart", action="store_true", help="begin anew, though a stopped run left answers")
    parser.add_argument("--batch-size", type=int, default=64, help="default: 64")
    parser.add_argument("--lr", type=float, help="learning rate; default: the method's rule")
    parser.add_argument(
        "--preset", default="imagenet", help="constants: imagenet, cifar (or cifar10), cifar100; default: imagenet"
    )
    parser.add_argument(
        "--mean", type=triple, help="of a model of your own, as 0.485,0.456,0.406; default: the base's, or none"
    )
    parser.add_argument("--std", type=triple, help="of a model of your own")
    parser.add_argument("--resize", type=int, help="short side; default: the base's, or as --crop")
    parser.add_argument("--crop", type=int, help="centre crop; default: the base's, or none")
    parser.add_argument(
        "--classes", metavar="WHICH",
        help="those that can come: 'folders' where they are named by wnid, or a file with a wnid or an index a line; "
        "labels are then places in this list",
    )  # fmt: skip
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="another order of arrival than by name")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print the answers as JSON lines instead of a summary")


def run(args: argparse.Namespace) -> int:
    """Answer, write the file whole, say what happened; 1 if files could not be read or answers were not finite."""
    import dataclasses
    import json
    import math
    import random

    from poem._util.files import check_file_writable
    from poem._util.journal import Journal
    from poem.cli._stop import Stopped, stoppable
    from poem.predict import answers, photos, summary
    from poem.recipes.methods import recipe
    from poem.streams.loading.prepare import MAX_SIDE

    check_file_writable(args.out)
    _values.within(args, 1, MAX_SIDE, "resize", "crop")
    _values.within(args, 1, None, "batch_size")
    _values.finite(args, "lr")
    _values.positive_std(args.std)
    _values.device(args.device)
    files = photos(args.folder)
    if args.out.exists() and any(args.out.samefile(path) for path in files if path.name == args.out.name):
        raise ValueError(f"{args.out} is one of the images; give another file with -o")
    recipe(args.method, args.preset)  # a name that nobody knows is told before a model is loaded
    if args.shuffle is None and len({path.parent for path in files}) > 1:
        print("files come folder by folder; if folders are classes, --shuffle 0 mixes them", file=sys.stderr)
    chosen, named = classes(args.classes, files, args.folder)
    model, settings, count = opened(
        args.model, args.weights, device=args.device, mean=args.mean, std=args.std, resize=args.resize, crop=args.crop
    )
    if chosen is None:
        hint(files, args.folder, count)
    else:
        settings |= narrowed(settings["names"], chosen, count, args.model)
        settings["wnids"] = wnids() if named else settings["wnids"]
    print(f"{args.model}, {args.method}; {settings['prepare']}; mean {settings['mean']}, std {settings['std']}",
          file=sys.stderr)  # fmt: skip
    if args.shuffle is not None:
        random.Random(args.shuffle).shuffle(files)
    stated = _settings(args, settings, files)
    with stoppable(), Journal(args.out, stated, restart=args.restart) as journal:
        if journal.done:
            say(f"going on after {journal.done} of {len(files)} images; --restart begins anew")
        batches = answers(
            model, files, args.method, folder=args.folder, batch_size=args.batch_size, lr=args.lr, preset=args.preset,
            journal=journal, **settings,
        )  # fmt: skip
        try:
            for _ in progress(batches, len(files), args.method, journal.done):
                pass
        except KeyboardInterrupt as stop:
            say(f"poem: stopped after {journal.done} of {len(files)} images, whose answers are in {journal.rows}; the "
                "same command goes on")  # fmt: skip
            return stop.code if isinstance(stop, Stopped) else 130
        found = sorted(journal.found, key=lambda each: each.file)
        save(found, args.out)
        journal.remove()
    if args.json:
        print("\n".join(json.dumps(dataclasses.asdict(each)) for each in found))
    else:
        for each in [each for each in found if each.error][:5]:
            print(f"unreadable: {each.error}")
        print(f"{summary(found)}\nwritten to {args.out}")
    lost = sum(each.confidence is not None and not math.isfinite(each.confidence) for each in found)
    if lost:
        say(f"{lost} answers were not finite (NaN or Inf): their labels mean nothing, and nan stands in {args.out}")
    return 1 if lost or any(each.error for each in found) else 0


def _settings(args: argparse.Namespace, settings: dict[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """All that the answers depend on, for the record of a run that may be stopped."""
    from poem import __version__
    from poem._util.journal import images_of

    stated = {
        "images": images_of(files, args.folder), "model": args.model, "weights": args.weights, "method": args.method,
        "preset": args.preset, "lr": args.lr, "batch_size": args.batch_size, "device": args.device,
        "poem": __version__,
    }  # fmt: skip
    used = {name: settings.get(name) for name in ("mean", "std", "classes")}
    plain = {name: list(value) if value is not None else None for name, value in used.items()}
    return {**stated, **plain, "prepare": str(settings["prepare"])}


def classes(which: str | None, files: Sequence[Path], folder: Path) -> tuple[list[int] | None, bool]:
    """The classes that can come, as indices of the logits, where somebody says so; and whether by wnid."""
    from poem._util.files import read_text
    from poem._util.nearest import nearest_hint
    from poem.predict import listed_classes, wnid_folders

    if which is None:
        return None, False
    if which == "folders":
        folders = wnid_folders(files, folder)
        if folders is None:
            raise ValueError("--classes folders needs every image in a folder named by wnid, such as n01440764; give a "
                             "file with an index a line instead")  # fmt: skip
        return list(folders.values()), True
    if not Path(which).is_file():
        remedy = nearest_hint(which.lower(), ["folders"], otherwise="such a file has a wnid or an index a line")
        raise ValueError(f"expected --classes folders or a file, got {which!r}, which is no file; {remedy}")
    text = read_text(Path(which))
    return listed_classes(text), any(not line.split()[0].isdecimal() for line in text.splitlines() if line.strip())


def narrowed(names: dict[int, str], chosen: Sequence[int], count: int | None, model: str) -> dict[str, Any]:
    """What changes where only some classes can come."""
    if count is not None and max(chosen, default=0) >= count:
        raise ValueError(f"expected classes below {count}, as {model} has, got class {max(chosen)}")
    return {"classes": chosen, "names": {at: names.get(each, str(each)) for at, each in enumerate(chosen)}}


def hint(files: Sequence[Path], folder: Path, count: int | None) -> None:
    """Folders that name some of ImageNet's classes are pointed out, for a model that has them all."""
    from poem.predict import wnid_folders

    folders = wnid_folders(files, folder) if count == 1000 else None
    if folders is not None and len(folders) < 1000:
        say(f"images lie in {len(folders)} folders named by wnid, and the model has 1000 classes: if no others can "
            "come, --classes folders keeps answers to these")  # fmt: skip


def wnids() -> dict[int, str]:
    """ImageNet's names of its classes, by index."""
    from poem.streams.datasets.classes import imagenet_wnids

    return dict(enumerate(imagenet_wnids()))


def say(words: str) -> None:
    """To whoever reads along, not into what is piped on."""
    print(words, file=sys.stderr)


def opened(
    name: str,
    weights: str | None,
    *,
    device: str = "cpu",
    mean: Triple | None = None,
    std: Triple | None = None,
    resize: int | None = None,
    crop: int | None = None,
) -> tuple[nn.Module, dict[str, Any], int | None]:
    """A model by name, what goes with it, and how many classes it has; says what it had to assume."""
    from poem import zoo
    from poem.predict import elsewhere, imagenet_names, imported, logits_of
    from poem.streams.loading.prepare import Prepare

    if ":" in name:
        model = imported(name)
        if weights is None:
            say(
                f"no --weights: {name} has to load its own; if it does not, the model is random and its answers are too"
            )
        else:
            zoo.load_weights(model, weights)
        if mean is None and std is None:
            say("no --mean and --std: the model is given images from 0 to 1 as they are; most ImageNet models want "
                "--mean 0.485,0.456,0.406 --std 0.229,0.224,0.225")  # fmt: skip
        settings: dict[str, Any] = {"prepare": Prepare(resize=resize or crop, crop=crop), "mean": mean, "std": std}
        return model.to(device), {**settings, "names": {}, "wnids": {}}, logits_of(model)
    try:
        zoo.base(name)
    except ValueError as error:
        if (place := elsewhere(name)) is None:
            raise
        raise ValueError(f"{error} Or, as torchvision builds it: --model {place} --weights FILE") from error
    model, base = zoo.load(name, weights)
    own = {"--mean": (mean, base.mean), "--std": (std, base.std)}
    for flag, (given, meant) in own.items():
        if given is not None and given != meant:
            say(f"{flag} replaces {name}'s own {flag[2:]} {meant}: its accuracy may suffer; leave it out to use that")
    prepare = Prepare(resize=resize or base.resize, crop=crop or base.crop, interpolation=base.interpolation)
    large = base.classes == 1000
    settings = {"prepare": prepare, "mean": mean or base.mean, "std": std or base.std,
                "names": imagenet_names() if large else {}, "wnids": wnids() if large else {}}  # fmt: skip
    return model.to(device), settings, base.classes


def progress(batches: Any, total: int, words: str, done: int = 0) -> Any:
    """A bar over images on the terminal; elsewhere a line after the first batch and now and then, with what is left."""
    import time

    from rich.console import Console
    from rich.progress import Progress

    from poem.cli._bar import duration

    console, before, began = Console(stderr=True), done, time.monotonic()
    said: float | None = None
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words, total=total, completed=done)
        for batch in batches:
            done += len(batch)
            bar.advance(task, len(batch))
            now = time.monotonic()
            if not console.is_terminal and done < total and (said is None or now - said > EVERY):
                said = now
                left = duration((now - began) * (total - done) / (done - before))
                say(f"{words}: {done}/{total} images, about {left} left")
            yield batch


def save(found: Sequence[Answer], path: Path) -> None:
    """A CSV file, whole or not at all."""
    from poem._util.files import write_atomic
    from poem._util.journal import table

    write_atomic(path, table(found))
