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

    from poem import zoo
    from poem.commands.predict import progress, save
    from poem.method import recipe
    from poem.pages.photos import Shown, page, thumbnail
    from poem.predict import answers, imagenet_names, photos, summary, wnid_folders
    from poem.report import write_whole
    from poem.streams._prepare import Prepare
    from poem.streams._shift import Shift

    if args.images is None:
        raise ValueError("expected your photos, as in poem demo imagenet --images photos/")
    files = photos(args.images)
    random.Random(0).shuffle(files)  # class folders would come one class at a time
    recipe(args.method)  # names that nobody knows are told before a model is loaded
    shift = None if args.corruption is None else (args.corruption, args.severity)
    if shift is not None:
        Shift(*shift)
    model, base = zoo.load("effnet-lite0", args.weights)
    if shift is None:
        print("photos like those a model was trained on: expect no gain; --corruption fog shows what adapting is for")
    names, classes = imagenet_names(), wnid_folders(files, args.images)
    if classes is not None:
        names = {place: names.get(index, str(index)) for place, index in enumerate(classes.values())}
    kept: dict[str, str] = {}

    def keep(images: Any, paths: Sequence[Path], last: Any) -> None:
        for image, path in zip(images, paths, strict=True):
            kept[str(path.relative_to(args.images))] = thumbnail(image)

    prepare = Prepare(resize=base.resize, crop=base.crop, interpolation=base.interpolation)
    found: list[Answer] = []
    batches = answers(
        model, files, args.method, folder=args.images, prepare=prepare, batch_size=args.batch_size or 64, names=names,
        classes=None if classes is None else list(classes.values()), mean=base.mean, std=base.std, corruption=shift,
        on_batch=keep,
    )  # fmt: skip
    for batch in progress(batches, len(files), args.method):
        found += batch
    lines = [*summary(found).splitlines(), *_accuracy(found, classes)]
    save(sorted(found, key=lambda each: each.file), args.out / "predictions.csv")
    read = [each for each in found if not each.error]
    shown = [Shown(each, kept[each.file], names.get(each.source_label or 0, str(each.source_label))) for each in read]
    text = page(
        f"{args.method} on {len(read)} photos{'' if shift is None else f' in {shift[0]}'}, {base.name}", lines, found,
        [each for each in shown if each.answer.newly_reliable],
        [each for each in shown if each.answer.label != each.answer.source_label],
        top=math.log(len(names) or base.classes),
    )  # fmt: skip
    write_whole(args.out / "photos.html", text)
    print("\n".join(lines))
    print(f"answers: {args.out / 'predictions.csv'}\npictures: {args.out / 'photos.html'}")
    return 0


def _accuracy(found: Sequence[Answer], classes: dict[str, int] | None) -> list[str]:
    if classes is None:
        return ["no labels: photos are not in folders named by wnid"]
    place = {name: at for at, name in enumerate(classes)}
    read = [(each, place[Path(each.file).parts[-2]]) for each in found if not each.error]
    plain = sum(each.source_label == truth for each, truth in read)
    right = sum(each.label == truth for each, truth in read)
    return [
        f"accuracy over {len(classes)} classes: {100 * right / len(read):.1f} %, unadapted "
        f"{100 * plain / len(read):.1f} % ({len(read)} photos)"
    ]
