"""Examples:
poem train-source digits --out weights
poem train-source cifar10 --root ROOT/cifar10-jpeg.tar.xz --out weights --device cuda
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
from pathlib import Path

from poem.cli import _values
from poem.cli._values import named_path


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("data", choices=("digits", "cifar10"), help="which source networks to train")
    parser.add_argument("--root", help="cifar10: its folder, tar or packed .npz; default: $POEM_DATA")
    parser.add_argument(
        "--out", type=named_path, default=Path("weights"), help="folder for the weights and their record"
    )
    parser.add_argument("--nets", nargs="+", metavar="NET", help="some of the three, such as cifar10-bn")
    parser.add_argument("--epochs", type=int, help="instead of each plan's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda where there is one, else cpu; digits: cpu")


def run(args: argparse.Namespace) -> int:
    """Train, write the weights, and write or extend `DATA.json` beside them."""
    import json
    import os
    from dataclasses import replace

    import torch

    from poem._util.files import check_folder_writable, read_json, write_atomic
    from poem.zoo.train import PLANS, train
    from poem.zoo.train_data import cifar10, digits

    names = [name for name in PLANS if name.startswith(args.data)]
    wanted = args.nets or names
    for name in wanted:
        if name not in names:
            raise ValueError(f"expected --nets among {', '.join(names)}, got {name!r}")
    if args.epochs is not None and args.epochs < 1:
        raise ValueError(f"expected --epochs of at least 1, got {args.epochs}")
    _values.within(args, *_values.SEEDS, "seed")
    if args.device is not None:
        _values.device(args.device)
    check_folder_writable(args.out)
    root = args.root or os.environ.get("POEM_DATA")
    if args.data == "cifar10" and not root:
        raise ValueError("no root given: pass --root, or set POEM_DATA to the folder or tar that holds CIFAR-10")
    device = args.device or ("cuda" if torch.cuda.is_available() and args.data == "cifar10" else "cpu")
    if args.data == "digits" and device == "cpu":
        torch.set_num_threads(1)  # small layers gain nothing from more, and sums keep one order
    task = digits() if args.data == "digits" else cifar10(Path(str(root)).expanduser())
    args.out.mkdir(parents=True, exist_ok=True)
    place = args.out / f"{args.data}.json"
    records = read_json(place) if place.is_file() else {}
    if not isinstance(records, dict):
        raise ValueError(f"expected the record of networks in {place}, got a {type(records).__name__}; remove it")
    for name in wanted:
        plan = replace(PLANS[name], epochs=args.epochs) if args.epochs else PLANS[name]
        with _bar(name) as tell:
            records[name] = train(name, task, args.out, seed=args.seed, device=device, plan=plan, tell=tell)
        write_atomic(place, json.dumps(dict(sorted(records.items())), indent=1) + "\n")
        record = records[name]
        print(f"{name}: {record['accuracy']:.2f} % of {record['test_images']} images never seen, {record['seconds']} s")
        print(f"  {args.out / record['file']} sha256 {record['sha256']}")
    return 0


class _bar:  # noqa: N801 - reads as a verb in `with`
    """A progress bar on the terminal, nothing elsewhere; called with epoch, epochs and loss."""

    def __init__(self, words: str) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self.words = words
        self.progress = Progress(console=console, disable=not console.is_terminal, transient=True)
        self.task = self.progress.add_task(words, total=None)

    def __enter__(self) -> _bar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def __call__(self, epoch: int, epochs: int, loss: float) -> None:
        """One epoch is over."""
        self.progress.update(self.task, completed=epoch, total=epochs, description=f"{self.words} loss {loss:.3f}")
