"""Examples:
poem predict photos/ -o predictions.csv
poem predict frames/ --model digits-bn --method tent --batch-size 32
poem predict photos/ --model mypackage.nets:build --mean 0.5 --std 0.5 --crop 224
poem predict val/ --classes folders --shuffle 0
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poem.commands.verify import triple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poem.predict import Answer


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("folder", type=Path, help="images, at any depth; in order of their names")
    parser.add_argument(
        "--model", default="effnet-lite0", help="a base (`poem list bases`), or package.module:function"
    )
    parser.add_argument("--weights", help="a file or folder with the base's weights")
    parser.add_argument("--method", default="poem", help="a name that `poem list` prints; default: poem")
    parser.add_argument("-o", "--out", type=Path, default=Path("predictions.csv"), help="default: predictions.csv")
    parser.add_argument("--batch-size", type=int, default=64, help="default: 64")
    parser.add_argument("--lr", type=float, help="learning rate; default: the method's rule")
    parser.add_argument(
        "--preset", default="imagenet", help="constants: imagenet, cifar or cifar100; default: imagenet"
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
    """Answer, write the file whole, say what happened; 1 if some files could not be read."""
    import dataclasses
    import json
    import random

    from poem.method import recipe
    from poem.predict import answers, photos, summary

    files = photos(args.folder)
    recipe(args.method, args.preset)  # a name that nobody knows is told before a model is loaded
    if args.shuffle is None and len({path.parent for path in files}) > 1:
        print("files come folder by folder; if folders are classes, --shuffle 0 mixes them", file=sys.stderr)
    chosen = classes(args, files)
    model, settings = opened(args)
    if chosen is not None:
        names = settings.get("names") or {}
        settings |= {"classes": chosen, "names": {at: names.get(each, str(each)) for at, each in enumerate(chosen)}}
    print(f"{args.model}, {args.method}; {settings['prepare']}; mean {settings['mean']}, std {settings['std']}",
          file=sys.stderr)  # fmt: skip
    if args.shuffle is not None:
        random.Random(args.shuffle).shuffle(files)
    found: list[Answer] = []
    try:
        batches = answers(
            model, files, args.method, folder=args.folder, batch_size=args.batch_size, lr=args.lr, preset=args.preset,
            **settings,
        )  # fmt: skip
        for batch in progress(batches, len(files), args.method):
            found += batch
    except KeyboardInterrupt:
        partial = args.out.with_name(f"{args.out.stem}.partial{args.out.suffix}")
        save(found, partial)
        print(f"poem: stopped; the first {len(found)} of {len(files)} answers are in {partial}")
        return 130
    found.sort(key=lambda each: each.file)
    save(found, args.out)
    if args.json:
        print("\n".join(json.dumps(dataclasses.asdict(each)) for each in found))
    else:
        for each in [each for each in found if each.error][:5]:
            print(f"unreadable: {each.error}")
        print(f"{summary(found)}\nwritten to {args.out}")
    return 1 if any(each.error for each in found) else 0


def classes(args: argparse.Namespace, files: Sequence[Path]) -> list[int] | None:
    """The classes that can come, as indices of the logits; says so where folders name them and nobody else does."""
    from poem import zoo
    from poem.predict import listed_classes, wnid_folders

    if args.classes is not None and args.classes != "folders":
        return listed_classes(Path(args.classes).read_text(encoding="utf-8"))
    count = 1000 if ":" in args.model else zoo.base(args.model).classes
    folders = wnid_folders(files, args.folder) if count == 1000 or args.classes else None
    if args.classes is not None:
        if folders is None:
            raise ValueError("--classes folders needs every image in a folder named by wnid, such as n01440764; give a "
                             "file with an index a line instead")  # fmt: skip
        return list(folders.values())
    if folders is not None and len(folders) < count:
        print(f"images lie in {len(folders)} folders named by wnid, and the model has more classes: if no others can "
              "come, --classes folders keeps answers to these", file=sys.stderr)  # fmt: skip
    return None


def opened(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The model, and what goes with it."""
    from poem import zoo
    from poem.predict import imagenet_names, imported
    from poem.streams._prepare import Prepare

    if ":" in args.model:
        model = imported(args.model).to(args.device)
        prepare = Prepare(resize=args.resize or args.crop, crop=args.crop)
        return model, {"prepare": prepare, "mean": args.mean, "std": args.std}
    model, base = zoo.load(args.model, args.weights)
    prepare = Prepare(resize=args.resize or base.resize, crop=args.crop or base.crop, interpolation=base.interpolation)
    names = imagenet_names() if base.classes == 1000 else {}
    settings = {"prepare": prepare, "names": names, "mean": args.mean or base.mean, "std": args.std or base.std}
    return model.to(args.device), settings


def progress(batches: Any, total: int, words: str) -> Any:
    """A bar over images on the terminal, a line now and then elsewhere."""
    import time

    from rich.console import Console
    from rich.progress import Progress

    console, done, said = Console(stderr=True), 0, time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words, total=total)
        for batch in batches:
            done += len(batch)
            bar.advance(task, len(batch))
            if not console.is_terminal and time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"{done}/{total} images", file=sys.stderr)
            yield batch


def save(found: Sequence[Answer], path: Path) -> None:
    """A CSV file, whole or not at all."""
    import csv
    import dataclasses
    import io

    from poem.predict import Answer
    from poem.report import write_whole

    text = io.StringIO()
    writer = csv.DictWriter(text, [item.name for item in dataclasses.fields(Answer)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(each) for each in found)
    write_whole(path, text.getvalue())
