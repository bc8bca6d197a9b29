"""`poem demo imagenet`: adapt an ImageNet model on the user's photos, and write a page of what changed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poem.guarded.guard_state import GuardState
    from poem.predict import Answer


def run_photo_demo(args: argparse.Namespace) -> int:
    """Predict, measure the accuracy where folders are named by wnid, and write a CSV file and a page."""
    import math
    import random
    from dataclasses import replace

    from poem._util.files import check_file_writable, write_atomic
    from poem._util.progress import track
    from poem.api import adapt
    from poem.bench.evaluate import GUARDED
    from poem.cli._predictions_csv import COLUMNS, GUARDED_COLUMNS, check_own_file, write_csv
    from poem.cli.predict import restrict_to_classes, wnids_by_index
    from poem.predict import answers, find_images, summary, wnid_folders
    from poem.recipes.methods import recipe
    from poem.report.photo_page import Photo, file_thumbnail, first_photos, photo_page, thumbnail
    from poem.streams.shift import Shift

    if args.images is None:
        raise ValueError("expected your photos, as in poem demo imagenet --images photos/")
    for name in ("predictions.csv", "photos.html"):
        check_file_writable(args.out / name)
    check_own_file(args.out / "predictions.csv")
    files, name = find_images(args.images), args.model or "effnet-lite0"
    method = args.method or GUARDED  # as `poem.adapt` and `poem predict` without a method
    random.Random(0).shuffle(files)  # in order of their names, class folders would come one class at a time
    recipe(args.method or "auto")  # raises for an unknown name before a model is loaded
    corruption = None if args.corruption is None else (args.corruption, args.severity)
    if corruption is not None:
        Shift(*corruption)
    model, settings, count = _open_model(name, args.weights)
    if corruption is None:
        print("photos like those a model was trained on: expect no gain; --corruption fog shows what adapting is for")
    classes = wnid_folders(files, args.images)
    files = files[: args.count]
    indices = None if classes is None else list(classes.values())
    if indices is not None:
        settings |= restrict_to_classes(settings["names"], indices, count, name) | {"wnids": wnids_by_index()}
    size = args.batch_size or 64
    shared = {key: settings[key] for key in ("mean", "std")}
    with_bn = indices is not None and method not in ("bn", "source")  # the gain of batch statistics without updates
    bn = adapt(model, "bn", classes=indices, batch_size=size, **shared) if with_bn else None
    thumbnails: dict[str, str] = {}
    bn_labels: dict[str, int] = {}

    def collect(images: Any, paths: Sequence[Path], last: Any) -> None:
        files = [str(path.relative_to(args.images)) for path in paths]
        thumbnails.update(zip(files, map(thumbnail, images), strict=True))
        if bn is not None:
            bn_labels.update(zip(files, bn(images).argmax(1).tolist(), strict=True))

    beside = "the model unadapted" + (" and batch statistics alone (bn)" if bn is not None else "")
    print(f"{len(files)} photos through {name} in batches of {size}: {method}, beside {beside}")
    found: list[Answer] = []
    guards: list[GuardState] = []
    if args.method is None:
        settings["on_end"] = lambda guard: guards.append(guard.state)
    batches = answers(
        model, files, args.method, folder=args.images, batch_size=size, corruption=corruption, on_batch=collect,
        **settings,
    )  # fmt: skip
    for batch in track(batches, method, len(files), unit="images", size=len):
        found += batch
    if bn is not None:
        bn.unload()
    labels = {} if classes is None else _true_labels(found, list(classes))
    lines = summary(found, labelled=bool(labels), guard=guards[0] if guards else None).splitlines()
    lines.append(_accuracy(found, labels, bn_labels, method, len(classes or ())))
    columns = COLUMNS if args.method else GUARDED_COLUMNS
    write_csv(sorted(found, key=lambda each: each.file), args.out / "predictions.csv", columns=columns)
    read = [each for each in found if not each.error]
    named = {file: (label, settings["names"].get(label, str(label))) for file, label in labels.items()}
    photos = [Photo(each, thumbnails[each.file], *named.get(each.file, (None, ""))) for each in read]
    changed = [each for each in photos if each.answer.label != each.answer.source_label]
    if corruption is not None:  # the first ones are shown beside the photos as they are in their files
        clean = {each.answer.file: file_thumbnail(args.images / each.answer.file) for each in first_photos(changed)}
        changed = [replace(each, clean=clean.get(each.answer.file, "")) for each in changed]
    where = "" if corruption is None else f" in {corruption[0]}, severity {corruption[1]}"
    text = photo_page(
        f"{method} on {len(read)} photos{where}, {name}",
        lines, found,
        [each for each in photos if each.answer.newly_reliable],
        changed,
        max_entropy=math.log(len(indices or ()) or count or 1000),
    )  # fmt: skip
    write_atomic(args.out / "photos.html", text)
    print("\n".join(lines))
    print(f"answers: {args.out / 'predictions.csv'}\npictures: {args.out / 'photos.html'}")
    return 0


def _open_model(name: str, weights: str | None) -> tuple[Any, dict[str, Any], int | None]:
    """Open a model as `poem predict` does; an imported one gets ImageNet's usual size and normalisation."""
    from poem import zoo
    from poem.cli.predict import open_model

    if ":" not in name:
        return open_model(name, weights)
    from poem.predict import imagenet_class_names

    mean, std = zoo.IMAGENET
    print(f"{name} is given photos as ImageNet's: short side 256, centre 224, mean {mean}, std {std}")
    model, settings, count = open_model(name, weights, mean=mean, std=std, resize=256, crop=224)
    return model, settings | {"names": imagenet_class_names() if count == 1000 else {}}, count


def _true_labels(found: Sequence[Answer], classes: Sequence[str]) -> dict[str, int]:
    """The class of each photo that could be read, by the name of its folder."""
    index = {name: at for at, name in enumerate(classes)}
    return {each.file: index[Path(each.file).parts[-2]] for each in found if not each.error}


def _accuracy(
    found: Sequence[Answer], labels: dict[str, int], bn_labels: dict[str, int], method: str, classes: int
) -> str:
    """The accuracy of the method, of the model unadapted and of `bn`, or why there is none."""
    if not labels:
        return "no labels: photos are not in folders named by wnid"
    read = [each for each in found if not each.error]
    predicted: dict[str, dict[str, int | None]] = {
        "unadapted": {each.file: each.source_label for each in read},
        "batch statistics alone (bn)": dict(bn_labels),
        method: {each.file: each.label for each in read},
    }
    right = {
        name: sum(label == labels[file] for file, label in each.items()) for name, each in predicted.items() if each
    }
    shares = ", ".join(f"{name} {100 * count / len(read):.1f} %" for name, count in right.items())
    return f"accuracy over {classes} classes, {len(read)} photos: {shares}"
