"""Examples:
poem predict photos/ -o predictions.csv
poem predict frames/ --model digits-bn --method tent --batch-size 32
poem predict photos/ --model mypackage.nets:build --mean 0.5 --std 0.5 --crop 224
poem predict photos/ --model torchvision.models:resnet18 --weights resnet18.pth --crop 224 --mean ... --std ...
poem predict val/ --classes folders --shuffle 0
poem predict photos/ --audit audit.jsonl
poem predict photos/ --method tent --budget 0.02

Without --method it is auto, guarded. With --guard the model unadapted answers beside the adapted one; harm is seen and
undone (`poem.guard`). --budget SHARE proves more: at most that share of answers differs from the model's own. --audit
FILE records every batch and decision; poem replay FILE photos/ repeats the run.

Answers are kept in predictions.partial.csv while it runs. Run the same command again to resume after a stop: images
that are answered are not read again, the adapter's state is loaded, and the result is that of a run without a stop.
predictions.csv of an earlier run is replaced; any other file in its place is an error.

predictions.csv has one row per image, with these columns:
file             path below the folder given
label, name      the predicted class: its index (with --classes its position in that list) and its name
class_index      the index of the predicted class among the model's logits, with --classes too
wnid             the class's WordNet id, where the classes are known to be ImageNet's
confidence       probability of the predicted class, 0 to 1
entropy          of the prediction, in nats; first_entropy: at the first forward pass, before any update on the batch
source_label, source_name, source_entropy
                 the prediction of the model unadapted
taught           whether the image was selected for an update
newly_reliable   whether it was selected only after an update, not at the first forward pass
verdict          guarded runs, so also without --method: whose answer it is, source, adapted, or mean of both; where it
                 is the source's, entropy is the source's too, and first_entropy the adapted model's
error            why there is no prediction
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poem.cli import _option_checks as checks
from poem.cli._option_checks import path_argument, rgb_argument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from poem.streams.loading.prepare import Prepare
    from poem.zoo import Triple


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("folder", type=path_argument, help="images, at any depth; in order of their names")
    parser.add_argument(
        "--model", default="effnet-lite0", help="a base (`poem list bases`), a hub id, or package.module:name"
    )
    parser.add_argument(
        "--weights",
        help="a file or folder with the base's weights; for package.module:function a .pth or .safetensors file",
    )
    parser.add_argument("--method", help="a name of `poem list`, or package.module:name; default: auto, with --guard")
    parser.add_argument(
        "-o", "--out", type=path_argument, default=Path("predictions.csv"), help="default: predictions.csv"
    )
    parser.add_argument(
        "--restart", action="store_true", help="start from the first image, though a stopped run can be resumed"
    )
    parser.add_argument("--batch-size", type=int, default=64, help="default: 64")
    parser.add_argument("--lr", type=float, help="learning rate; default: the method's rule")
    parser.add_argument(
        "--preset",
        help="constants: imagenet, cifar (or cifar10), cifar100; default: imagenet, for auto by the number of classes",
    )
    parser.add_argument(
        "--guard", action=argparse.BooleanOptionalAction,
        help="the model unadapted answers beside the adapted one, and harm is undone; default: without --method",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=float, metavar="SHARE",
        help="at most this share of answers differs from the model's own, such as 0.02; with it, --guard is on",
    )  # fmt: skip
    parser.add_argument(
        "--audit", type=path_argument, metavar="FILE",
        help="a new file for a JSON line of every batch and event, for poem replay; with it, --guard is on",
    )  # fmt: skip
    parser.add_argument(
        "--mean", type=rgb_argument, help="of a model of your own, as 0.485,0.456,0.406; default: the base's, or none"
    )
    parser.add_argument("--std", type=rgb_argument, help="of a model of your own, as --mean")
    parser.add_argument("--resize", type=int, help="short side; default: the base's, or as --crop")
    parser.add_argument("--crop", type=int, help="centre crop; default: the base's, or none")
    parser.add_argument(
        "--classes", metavar="WHICH",
        help="only these classes: 'folders' where they are named by wnid, or a file with a wnid or an index per line; "
        "labels are then positions in this list",
    )  # fmt: skip
    parser.add_argument(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="shuffle the images with this seed; default: in order of their names",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print the answers as JSON lines instead of a summary")


def run(args: argparse.Namespace) -> int:
    """Predict, write the CSV file, print a summary; returns 1 if files could not be read or answers were not finite."""
    import dataclasses
    import json
    import math
    import random

    from poem._util.files import check_file_writable
    from poem._util.progress import track
    from poem._util.signals import StopSignal, raise_stop_signals
    from poem.cli._checkpoint import FileCheckpoint
    from poem.cli._predictions_csv import COLUMNS, GUARDED_COLUMNS, check_own_file, write_csv
    from poem.guarded.guard_state import GuardState
    from poem.predict import answers, find_images, summary
    from poem.recipes.methods import recipe
    from poem.streams.loading.prepare import MAX_SIDE

    check_file_writable(args.out)
    checks.check_range(args, 1, MAX_SIDE, "resize", "crop")
    checks.check_range(args, 1, None, "batch_size")
    checks.check_finite(args, "lr")
    checks.check_std(args.std)
    checks.check_devices(args.device)
    files = find_images(args.folder)
    if args.out.exists() and any(args.out.samefile(path) for path in files if path.name == args.out.name):
        raise ValueError(f"{args.out} is one of the images; give another file with -o")
    check_own_file(args.out)
    guarded = _guarded(args)
    args.method = args.method or "auto"
    recipe(args.method, args.preset or "imagenet")  # raises for an unknown name before a model is loaded
    append = _check_guard(args) if guarded else False
    columns = GUARDED_COLUMNS if guarded else COLUMNS
    if args.shuffle is None and len({path.parent for path in files}) > 1:
        _log("files come folder by folder; if folders are classes, --shuffle 0 mixes them")
    classes, by_wnid = _parse_classes(args.classes, files, args.folder)
    model, settings, count = open_model(
        args.model, args.weights, device=args.device, mean=args.mean, std=args.std, resize=args.resize, crop=args.crop
    )
    if classes is None:
        _suggest_classes(files, args.folder, count)
    else:
        settings |= restrict_to_classes(settings["names"], classes, count, args.model)
        settings["wnids"] = wnids_by_index() if by_wnid else settings["wnids"]
    named = f"{args.method}, guarded" if guarded else args.method
    _log(f"{args.model}, {named}; {settings['prepare']}; mean {settings['mean']}, std {settings['std']}")
    if args.shuffle is not None:
        random.Random(args.shuffle).shuffle(files)
    stated = _checkpoint_settings(args, settings, files)
    states: list[GuardState] = []
    if guarded:
        stated["guard"] = {"budget": args.budget, "audit": None if args.audit is None else str(args.audit)}
        settings["guard"] = _guard_settings(args, settings["prepare"], len(files), append=append)
        settings["on_end"] = lambda guard: states.append(guard.state)
    with (
        raise_stop_signals(),
        FileCheckpoint(args.out, stated, restart=args.restart, columns=columns) as checkpoint,
    ):
        if checkpoint.done:
            _log(f"resuming after {checkpoint.done} of {len(files)} images; --restart begins anew")
        batches = answers(
            model, files, args.method, folder=args.folder, batch_size=args.batch_size, lr=args.lr, preset=args.preset,
            checkpoint=checkpoint, **settings,
        )  # fmt: skip
        try:
            for _ in track(batches, args.method, len(files), unit="images", size=len, done=checkpoint.done):
                pass
        except KeyboardInterrupt as stop:
            _log(f"poem: stopped after {checkpoint.done} of {len(files)} images, whose answers are in "
                 f"{checkpoint.rows}; the same command goes on")  # fmt: skip
            return stop.code if isinstance(stop, StopSignal) else 130
        found = sorted(checkpoint.answers, key=lambda each: each.file)
        write_csv(found, args.out, columns=columns)
        checkpoint.remove()
    if args.json:
        rows = ({name: row[name] for name in columns} for row in map(dataclasses.asdict, found))
        print("\n".join(map(json.dumps, rows)))
    else:
        for each in [each for each in found if each.error][:5]:
            print(f"unreadable: {each.error}")
        print(f"{summary(found, guard=states[0] if states else None)}\nwritten to {args.out}")
        if args.audit is not None:
            print(f"audit in {args.audit}; poem replay {args.audit} {args.folder} repeats the run")
    lost = sum(each.confidence is not None and not math.isfinite(each.confidence) for each in found)
    if lost:
        _log(f"{lost} answers were not finite (NaN or Inf): their labels mean nothing, and nan stands in {args.out}")
    return 1 if lost or any(each.error for each in found) else 0


def _guarded(args: argparse.Namespace) -> bool:
    """Whether a guard was asked for, by itself, by one of its options, or by naming no method."""
    asked = [f"--{name}" for name in ("budget", "audit") if getattr(args, name) is not None]
    if args.guard is False and asked:
        raise ValueError(f"expected --guard with {' and '.join(asked)}, got --no-guard; leave one out")
    if args.guard is None:
        return bool(asked) or args.method is None
    return bool(args.guard)


def _check_guard(args: argparse.Namespace) -> bool:
    """Check the options of a guarded run before a model is loaded; returns whether its audit goes on."""
    from poem._util.files import check_file_writable
    from poem.cli._checkpoint import checkpoint_files
    from poem.guarded.settings import GuardSettings

    checks.check_finite(args, "budget")
    GuardSettings(budget=args.budget)
    if args.method == "source":
        raise ValueError("expected a method that adapts with --guard, --budget or --audit, got source; see poem list")
    rows, saved = checkpoint_files(args.out)
    going_on = rows.exists() and not args.restart
    if args.audit is None:
        return False
    if args.audit.resolve() in [path.resolve() for path in (args.out, rows, saved)]:
        raise ValueError(f"expected a file of its own for --audit, got {args.audit}, which holds the predictions")
    check_file_writable(args.audit)
    if not going_on and args.audit.exists() and args.audit.stat().st_size:
        raise FileExistsError(f"expected a new file for --audit, got {args.audit}, which has content; name another")
    args.audit.parent.mkdir(parents=True, exist_ok=True)
    return going_on


def _guard_settings(args: argparse.Namespace, prepare: Prepare, files: int, *, append: bool) -> dict[str, Any]:
    """The argument `guard` of `poem.adapt`; the audit's header gets what `poem replay` needs to find the images."""
    import dataclasses

    from poem import __version__

    about = {
        "model": args.model, "weights": args.weights, "method": args.method, "preset": args.preset, "lr": args.lr,
        "batch_size": args.batch_size, "prepare": dataclasses.asdict(prepare), "shuffle": args.shuffle,
        "files": files, "device": args.device, "poem": __version__,
    }  # fmt: skip
    return {"budget": args.budget, "audit": args.audit, "append": append, "about": about}


def _checkpoint_settings(args: argparse.Namespace, settings: dict[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """Everything that the answers depend on: a run is resumed only with the same."""
    from poem import __version__
    from poem.cli._checkpoint import hash_file_list

    stated = {
        "images": hash_file_list(files, args.folder), "model": args.model, "weights": args.weights,
        "method": args.method, "preset": args.preset or ("auto" if args.method == "auto" else "imagenet"),
        "lr": args.lr, "batch_size": args.batch_size, "device": args.device, "poem": __version__,
    }  # fmt: skip
    used = {name: settings.get(name) for name in ("mean", "std", "classes")}
    plain = {name: list(value) if value is not None else None for name, value in used.items()}
    return {**stated, **plain, "prepare": str(settings["prepare"])}


def _parse_classes(which: str | None, files: Sequence[Path], folder: Path) -> tuple[list[int] | None, bool]:
    """Parse `--classes`: indices of the logits, or None without the option; and whether wnids gave them."""
    from poem._util.files import read_text
    from poem._util.nearest import nearest_hint
    from poem.predict import parse_class_list, wnid_folders

    if which is None:
        return None, False
    if which == "folders":
        folders = wnid_folders(files, folder)
        if folders is None:
            raise ValueError("--classes folders needs every image in a folder named by wnid, such as n01440764; give a "
                             "file with an index per line instead")  # fmt: skip
        return list(folders.values()), True
    if not Path(which).is_file():
        remedy = nearest_hint(which.lower(), ["folders"], otherwise="such a file has a wnid or an index per line")
        raise ValueError(f"expected --classes folders or a file, got {which!r}, which is no file; {remedy}")
    text = read_text(Path(which))
    return parse_class_list(text), any(not line.split()[0].isdecimal() for line in text.splitlines() if line.strip())


def restrict_to_classes(names: dict[int, str], classes: Sequence[int], count: int | None, model: str) -> dict[str, Any]:
    """The settings of `poem.predict.answers` for some of the model's classes: their indices, and names by position."""
    if count is not None and max(classes, default=0) >= count:
        raise ValueError(f"expected classes below {count}, as {model} has, got class {max(classes)}")
    return {"classes": classes, "names": {at: names.get(each, str(each)) for at, each in enumerate(classes)}}


def _suggest_classes(files: Sequence[Path], folder: Path, count: int | None) -> None:
    """Suggest `--classes folders` where folders name some of ImageNet's classes and the model has all 1000."""
    from poem.predict import wnid_folders

    folders = wnid_folders(files, folder) if count == 1000 else None
    if folders is not None and len(folders) < 1000:
        _log(f"images lie in {len(folders)} folders named by wnid, and the model has 1000 classes: if no others can "
             "occur, --classes folders keeps answers to these")  # fmt: skip


def wnids_by_index() -> dict[int, str]:
    """WordNet ids of ImageNet's classes by index."""
    from poem.streams.datasets.classes import imagenet_wnids

    return dict(enumerate(imagenet_wnids()))


def _log(line: str) -> None:
    """Print to standard error, so that piped output stays clean."""
    print(line, file=sys.stderr)


def _is_plain_function(name: str) -> bool:
    """Whether a model's name is that of a function which states no weights and normalisation."""
    from poem._util import outside
    from poem.zoo.catalog import Base
    from poem.zoo.hub_bases import is_hub_id
    from poem.zoo.outside_bases import Factory, factory_of

    if ":" not in name or is_hub_id(name):
        return False
    if not outside.is_path(name):
        raise ValueError(f"expected package.module:function, such as torchvision.models:resnet18, got {name!r}")
    found = factory_of(name)
    return not isinstance(found, Base) and found == Factory(found.build)


def open_model(
    name: str,
    weights: str | None,
    *,
    device: str = "cpu",
    mean: Triple | None = None,
    std: Triple | None = None,
    resize: int | None = None,
    crop: int | None = None,
) -> tuple[nn.Module, dict[str, Any], int | None]:
    """Open a base by name, or import a model; prints a hint where a setting had to be assumed.

    Returns:
        The model, settings for `poem.predict.answers` (prepare, mean, std, names, wnids), and the number of classes.
    """
    from poem import zoo
    from poem.predict import class_count, imagenet_class_names, import_model, torchvision_path
    from poem.streams.loading.prepare import Prepare

    if _is_plain_function(name):
        model = import_model(name)
        if weights is None:
            _log(
                f"no --weights: {name} has to load its own; if it does not, the model is random and its answers are too"
            )
        else:
            zoo.load_weights(model, weights)
        if mean is None and std is None:
            _log("no --mean and --std: the model is given images from 0 to 1 as they are; most ImageNet models want "
                 "--mean 0.485,0.456,0.406 --std 0.229,0.224,0.225")  # fmt: skip
        settings: dict[str, Any] = {"prepare": Prepare(resize=resize or crop, crop=crop), "mean": mean, "std": std}
        return model.to(device), {**settings, "names": {}, "wnids": {}}, class_count(model)
    try:
        zoo.base(name)
    except ValueError as error:
        if (path := torchvision_path(name)) is None:
            raise
        raise ValueError(f"{error} Or, as torchvision builds it: --model {path} --weights FILE") from error
    model, base = zoo.load(name, weights)
    own = {"--mean": (mean, base.mean), "--std": (std, base.std)}
    for flag, (given, expected) in own.items():
        if given is not None and given != expected:
            _log(
                f"{flag} replaces {name}'s own {flag[2:]} {expected}: its accuracy may suffer; leave it out to use that"
            )
    sides = {"resize": resize or base.resize or crop or None, "crop": crop or base.crop or None}
    direct = base.direct and not resize
    prepare = Prepare(**sides, interpolation=base.interpolation, direct=direct)
    imagenet = base.classes == 1000
    settings = {"prepare": prepare, "mean": mean or base.mean, "std": std or base.std,
                "names": imagenet_class_names() if imagenet else {},
                "wnids": wnids_by_index() if imagenet else {}}  # fmt: skip
    return model.to(device), settings, base.classes
