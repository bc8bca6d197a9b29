"""`poem demo imagenet`: an ImageNet model on the user's own photos, with a page of what changed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poem.predict import Answer


def run(args: argparse.Namespace) -> int:
    """Answer, compare with labels where folders are wnids, write a CSV file and a page."""
    import math
    import random

    from poem._util.files import check_file_writable, write_atomic
    from poem.api import adapt
    from poem.cli.predict import narrowed, progress, save, wnids
    from poem.predict import answers, photos, summary, wnid_folders
    from poem.recipes.methods import recipe
    from poem.report.photos import Shown, page, thumbnail
    from poem.streams.shift import Shift

    if args.images is None:
        raise ValueError("expected your photos, as in poem demo imagenet --images photos/")
    for place in ("predictions.csv", "photos.html"):
        check_file_writable(args.out / place)
    files, method, name = photos(args.images), args.method or "poem", args.model or "effnet-lite0"
    random.Random(0).shuffle(files)  # class folders would come one class at a time
    recipe(method)  # names that nobody knows are told before a model is loaded
    shift = None if args.corruption is None else (args.corruption, args.severity)
    if shift is not None:
        Shift(*shift)
    model, settings, count = _opened(name, args.weights)
    if shift is None:
        print("photos like those a model was trained on: expect no gain; --corruption fog shows what adapting is for")
    classes = wnid_folders(files, args.images)
    files = files[: args.count]
    chosen = None if classes is None else list(classes.values())
    if chosen is not None:
        settings |= narrowed(settings["names"], chosen, count, name) | {"wnids": wnids()}
    size = args.batch_size or 64
    shared = {key: settings[key] for key in ("mean", "std")}
    alone = chosen is not None and method not in ("bn", "source")  # what norm layers do without learning
    still = adapt(model, "bn", classes=chosen, batch_size=size, **shared) if alone else None
    kept: dict[str, str] = {}
    guesses: dict[str, int] = {}

    def keep(images: Any, paths: Sequence[Path], last: Any) -> None:
        files = [str(path.relative_to(args.images)) for path in paths]
        kept.update(zip(files, map(thumbnail, images), strict=True))
        if still is not None:
            guesses.update(zip(files, still(images).argmax(1).tolist(), strict=True))

    beside = "the model unadapted" + (" and batch statistics alone (bn)" if still is not None else "")
    print(f"{len(files)} photos through {name} in batches of {size}: {method}, beside {beside}")
    found: list[Answer] = []
    batches = answers(
        model, files, method, folder=args.images, batch_size=size, corruption=shift, on_batch=keep, **settings
    )
    for batch in progress(batches, len(files), method):
        found += batch
    if still is not None:
        still.unload()
    truth = {} if classes is None else _truth(found, list(classes))
    lines = summary(found, labelled=bool(truth)).splitlines()
    lines.append(_accuracy(found, truth, guesses, method, len(classes or ())))
    save(sorted(found, key=lambda each: each.file), args.out / "predictions.csv")
    read = [each for each in found if not each.error]
    true = {file: (label, settings["names"].get(label, str(label))) for file, label in truth.items()}
    shown = [Shown(each, kept[each.file], *true.get(each.file, (None, ""))) for each in read]
    text = page(
        f"{method} on {len(read)} photos{'' if shift is None else f' in {shift[0]}, severity {shift[1]}'}, {name}",
        lines, found,
        [each for each in shown if each.answer.newly_reliable],
        [each for each in shown if each.answer.label != each.answer.source_label],
        top=math.log(len(chosen or ()) or count or 1000),
    )  # fmt: skip
    write_atomic(args.out / "photos.html", text)
    print("\n".join(lines))
    print(f"answers: {args.out / 'predictions.csv'}\npictures: {args.out / 'photos.html'}")
    return 0


def _opened(name: str, weights: str | None) -> tuple[Any, dict[str, Any], int | None]:
    """As `poem predict` opens it; what a model of one's own does not say is ImageNet's usual."""
    from poem import zoo
    from poem.cli.predict import opened

    if ":" not in name:
        return opened(name, weights)
    from poem.predict import imagenet_names

    mean, std = zoo.IMAGENET
    print(f"{name} is given photos as ImageNet's: short side 256, centre 224, mean {mean}, std {std}")
    model, settings, count = opened(name, weights, mean=mean, std=std, resize=256, crop=224)
    return model, settings | {"names": imagenet_names() if count == 1000 else {}}, count


def _truth(found: Sequence[Answer], classes: Sequence[str]) -> dict[str, int]:
    """The class of each photo that could be read, by the folder it lies in."""
    place = {name: at for at, name in enumerate(classes)}
    return {each.file: place[Path(each.file).parts[-2]] for each in found if not each.error}


def _accuracy(
    found: Sequence[Answer], truth: dict[str, int], guesses: dict[str, int], method: str, classes: int
) -> str:
    """The shares that are right, or why there are none."""
    if not truth:
        return "no labels: photos are not in folders named by wnid"
    read = [each for each in found if not each.error]
    said: dict[str, dict[str, int | None]] = {
        "unadapted": {each.file: each.source_label for each in read},
        "batch statistics alone (bn)": dict(guesses),
        method: {each.file: each.label for each in read},
    }
    right = {
        name: sum(label == truth[file] for file, label in labels.items()) for name, labels in said.items() if labels
    }
    shares = ", ".join(f"{name} {100 * count / len(read):.1f} %" for name, count in right.items())
    return f"accuracy over {classes} classes, {len(read)} photos: {shares}"
