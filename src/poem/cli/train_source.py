"""Examples:
poem train-source digits --out weights
poem train-source cifar10 --root ROOT/cifar10-jpeg.tar.xz --out weights --device cuda
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
from pathlib import Path

from poem._util.limits import SEED_RANGE
from poem.cli import _option_checks as checks
from poem.cli._option_checks import path_argument


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("data", choices=("digits", "cifar10"), help="which source networks to train")
    parser.add_argument("--root", help="cifar10: its folder, tar or packed .npz; default: $POEM_DATA")
    parser.add_argument(
        "-o", "--out", type=path_argument, default=Path("weights"), help="folder for the weights and their record"
    )
    parser.add_argument("--nets", nargs="+", metavar="NET", help="some of the three, such as cifar10-bn")
    parser.add_argument("--epochs", type=int, help="instead of each plan's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda where there is one, else cpu; digits: cpu")


def run(args: argparse.Namespace) -> int:
    """Train the networks, write their weights, and write or extend `DATA.json` beside them."""
    import json
    import os
    from dataclasses import replace

    import torch

    from poem._util.files import check_folder_writable, read_json, write_atomic
    from poem._util.progress import Progress
    from poem.zoo.train import PLANS, train
    from poem.zoo.train_data import cifar10, digits

    names = [name for name in PLANS if name.startswith(args.data)]
    wanted = args.nets or names
    for name in wanted:
        if name not in names:
            raise ValueError(f"expected --nets among {', '.join(names)}, got {name!r}")
    if args.epochs is not None and args.epochs < 1:
        raise ValueError(f"expected --epochs of at least 1, got {args.epochs}")
    checks.check_range(args, *SEED_RANGE, "seed")
    if args.device is not None:
        checks.check_devices(args.device)
    check_folder_writable(args.out)
    root = args.root or os.environ.get("POEM_DATA")
    if args.data == "cifar10" and not root:
        raise ValueError("no root given: pass --root, or set POEM_DATA to the folder or tar that holds CIFAR-10")
    device = args.device or ("cuda" if torch.cuda.is_available() and args.data == "cifar10" else "cpu")
    if args.data == "digits" and device == "cpu":
        torch.set_num_threads(1)  # small layers gain nothing from more, and sums keep one order
    task = digits() if args.data == "digits" else cifar10(Path(str(root)).expanduser())
    args.out.mkdir(parents=True, exist_ok=True)
    record_file = args.out / f"{args.data}.json"
    records = read_json(record_file) if record_file.is_file() else {}
    if not isinstance(records, dict):
        raise ValueError(f"expected the record of networks in {record_file}, got a {type(records).__name__}; remove it")
    for name in wanted:
        plan = replace(PLANS[name], epochs=args.epochs) if args.epochs else PLANS[name]
        with Progress(name, plan.epochs, unit="epochs") as progress:

            def tell(epoch: int, epochs: int, loss: float, progress: Progress = progress) -> None:
                progress.update(epoch, epochs, note=f"loss {loss:.3f}")

            records[name] = train(name, task, args.out, seed=args.seed, device=device, plan=plan, tell=tell)
        write_atomic(record_file, json.dumps(dict(sorted(records.items())), indent=1) + "\n")
        record = records[name]
        print(f"{name}: {record['accuracy']:.2f} % of {record['test_images']} test images, {record['seconds']} s")
        print(f"  {args.out / record['file']} sha256 {record['sha256']}")
    return 0
