"""Examples:
poem train-source digits --out weights
poem train-source cifar10 --root ROOT --out weights --device cuda --seconds 270
poem train-source cifar100 --root ROOT --nets cifar100-bn --out weights --device cuda --seconds 270

Each network's accuracy is compared with its record, of the package or of an earlier run into the same folder.
Exit codes: 0 trained, 1 trained and below the record by more than two standard errors, 2 bad input.
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poem._util.limits import SEED_RANGE
from poem.cli import _option_checks as checks
from poem.cli._option_checks import path_argument

if TYPE_CHECKING:
    from poem.zoo.train_data import TrainTestData


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("data", choices=("digits", "cifar10", "cifar100"), help="which source networks to train")
    parser.add_argument(
        "--root", help="cifar10, cifar100: folder or tar (cifar10: or packed .npz); default: $POEM_DATA"
    )
    parser.add_argument(
        "-o", "--out", type=path_argument, default=Path("weights"), help="folder for the weights and their record"
    )
    parser.add_argument("--nets", nargs="+", metavar="NET", help="some of the three, such as cifar10-bn")
    parser.add_argument("--epochs", type=int, help="instead of each plan's own")
    parser.add_argument(
        "--seconds", type=float, help="per network: a plan that would take longer gets fewer epochs; default: no limit"
    )
    parser.add_argument("--partial", action="store_true", help="accept fewer images than published, for a trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda where there is one, else cpu; digits: cpu")


def run(args: argparse.Namespace) -> int:
    """Train the networks, write their weights and `DATA.json` beside them; returns 1 if one is below its record."""
    import json

    import torch

    from poem._util.files import read_json, write_atomic
    from poem.zoo.catalog import training_records
    from poem.zoo.train_data import cifar10, cifar100, digits
    from poem.zoo.training_check import check_record

    wanted, root = _checked(args)
    device = args.device or ("cuda" if torch.cuda.is_available() and args.data != "digits" else "cpu")
    if args.data == "digits" and device == "cpu":
        torch.set_num_threads(1)  # small layers gain nothing from more, and sums keep one order
    read = {"cifar10": cifar10, "cifar100": cifar100}
    task = digits() if args.data == "digits" else read[args.data](Path(str(root)).expanduser(), partial=args.partial)
    args.out.mkdir(parents=True, exist_ok=True)
    record_file = args.out / f"{args.data}.json"
    records = read_json(record_file) if record_file.is_file() else {}
    if not isinstance(records, dict):
        raise ValueError(f"expected the record of networks in {record_file}, got a {type(records).__name__}; remove it")
    earlier, below = {**records, **training_records(f"{args.data}.json")}, []
    for name in wanted:
        record = records[name] = _train(args, name, task, device)
        write_atomic(record_file, json.dumps(dict(sorted(records.items())), indent=1) + "\n")
        print(
            f"{name}: {record['accuracy']:.2f} % of {record['test_images']} test images (standard error "
            f"{record['standard_error']:.2f}), {record['epochs']} epochs, {record['seconds']} s"
        )
        print(f"  {args.out / record['file']} {record['bytes'] / 1e6:.2f} MB, sha256 {record['sha256']}")
        found = check_record(record, earlier.get(name))
        print(f"  no record of {name} to compare with" if found is None else f"  {found}")
        below += [name] if found is not None and not found.passed else []
    return 1 if below else 0


def _train(args: argparse.Namespace, name: str, task: TrainTestData, device: str) -> dict[str, Any]:
    """Train one network, with its progress; returns its record."""
    from dataclasses import replace

    from poem._util.progress import Progress
    from poem.zoo.train import PLANS, train

    plan = replace(PLANS[name], epochs=args.epochs) if args.epochs else PLANS[name]
    with Progress(name, plan.epochs, unit="epochs") as progress:

        def tell(epoch: int, epochs: int, loss: float) -> None:
            progress.update(epoch, epochs, note=f"loss {loss:.3f}")

        return train(name, task, args.out, seed=args.seed, device=device, budget=args.seconds, plan=plan, tell=tell)


def _checked(args: argparse.Namespace) -> tuple[list[str], str | None]:
    """The networks to train and the data's folder.

    Raises:
        ValueError: An option is not what it should be.
    """
    import os

    from poem._util.files import check_folder_writable
    from poem.zoo.train import PLANS

    names = [name for name in PLANS if name.startswith(f"{args.data}-")]
    wanted = args.nets or names
    for name in wanted:
        if name not in names:
            raise ValueError(f"expected --nets among {', '.join(names)}, got {name!r}")
    if args.epochs is not None and args.epochs < 1:
        raise ValueError(f"expected --epochs of at least 1, got {args.epochs}")
    if args.seconds is not None and not args.seconds > 0:
        raise ValueError(f"expected --seconds above 0, got {args.seconds:g}")
    checks.check_finite(args, "seconds")
    checks.check_range(args, *SEED_RANGE, "seed")
    if args.device is not None:
        checks.check_devices(args.device)
    check_folder_writable(args.out)
    root = args.root or os.environ.get("POEM_DATA")
    if args.data != "digits" and not root:
        title = args.data.upper().replace("CIFAR", "CIFAR-")
        raise ValueError(f"no root given: pass --root, or set POEM_DATA to the folder or tar that holds {title}")
    return wanted, root
