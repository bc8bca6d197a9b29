"""Examples:
poem run --base digits-bn --data digits-test --method poem --corruption fog --preset cifar --lr 0.005
poem run --base vit-b16-B --data imagenet-c --method sar --corruption fog --n 1000 --root ROOT -o sar.json
poem run --base digits-gn --data digits-test --method tent --scenario continual --corruption fog snow contrast
poem run --base digits-bn --data digits-test --method tent --corruption fog --guard
poem run --base my_models:small --data my_data:photos --method my_methods:mine+poem --weights small.pth
poem run CELL.json --seed 1 --set changes.threshold=0.5

CELL.json holds a cell, or a result, whose cell is then run again; flags > file > defaults.
Exit codes: 0 measured, 1 measured with answers that are NaN or infinite, 2 bad input.
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poem._util.limits import MAX_PROCESSES, SEED_RANGE
from poem.cli import _option_checks as checks
from poem.cli._option_checks import path_argument

if TYPE_CHECKING:
    from poem.bench.cell import Cell
    from poem.bench.result import CellResult

_FLAGS = (
    "base", "data", "method", "scenario", "corruptions", "severity", "seed", "batch_size", "n", "lr", "preset",
    "threads", "guard",
)  # fmt: skip
"""Options that are fields of a cell."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "file", nargs="?", type=path_argument, metavar="CELL.json", help="a cell or a result; flags go on top"
    )
    parser.add_argument("--base", help="a name of poem list bases, timm:NAME, ..., or package.module:name")
    parser.add_argument("--data", help="a data set's name, or package.module:name; clean data is corrupted here")
    parser.add_argument("--method", help="a name of poem list, or package.module:name")
    parser.add_argument("--scenario", help="single, continual, mixed, label-shift, ...; default: single")
    parser.add_argument("--corruption", dest="corruptions", nargs="+", metavar="NAME", help="default: clean")
    parser.add_argument("--severity", type=int, help="1 to 5; default: 5")
    parser.add_argument("--seed", type=int, help="default: 0")
    parser.add_argument("--batch-size", type=int, help="default: 64")
    parser.add_argument("--n", "--limit", dest="n", type=int, help="images of each domain; default: all")
    parser.add_argument("--lr", type=float, help="default: the method's own rule")
    parser.add_argument("--preset", help="imagenet, cifar (or cifar10), cifar100; default: imagenet")
    parser.add_argument("--guard", action="store_true", default=None, help="a guard around the method (poem.guard)")
    parser.add_argument("--threads", type=int, help="of the CPU; default: 1")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any other field of the cell")
    parser.add_argument("--root", help="where data lies; default: $POEM_DATA")
    parser.add_argument(
        "--weights", metavar="FOLDER", help="where weight files lie; or the one file of a network of your own"
    )
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument(
        "--loaders", type=int, metavar="N", help="loader processes; default: up to 16 on a GPU, 0 on a CPU"
    )
    parser.add_argument("-o", "--out", type=path_argument, metavar="FILE", help="write the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure one cell and print its card and metrics; returns 1 if an answer was not finite."""
    from poem._util.files import check_file_writable
    from poem.bench.load_cell import Machine
    from poem.bench.measure import measure
    from poem.bench.runners import CellProgress
    from poem.bench.sweep import SweepPlanned
    from poem.cli._sweep_progress import SweepProgress

    if args.out is not None:
        check_file_writable(args.out)
    checks.check_range(args, 1, MAX_PROCESSES, "threads")
    checks.check_range(args, 0, MAX_PROCESSES, "loaders")
    checks.check_range(args, *SEED_RANGE, "seed")
    checks.check_finite(args, "lr")
    checks.check_exists(args, "weights")
    checks.check_devices(args.device)
    cell = _cell(args)
    if cell.data == "digits" and cell.base.startswith("digits-"):
        print(f"digits are another set, 8x8 and enlarged, than {cell.base} was trained for; use --data digits-test",
              file=sys.stderr)  # fmt: skip
    machine = Machine(root=args.root, weights=args.weights, device=args.device, workers=args.loaders)
    with SweepProgress() as progress:
        progress(SweepPlanned((cell,), ()))
        result = measure(cell, machine, on_progress=lambda images, total: progress(CellProgress(cell, images, total)))
    print(_result_text(result))
    if args.out is not None:
        result.save(args.out)
        print(f"\nresult in {args.out}")
    if result.nonfinite:
        count = f"{result.nonfinite} of {result.card['total']}"
        print(f"poem run: {count} answers were not finite (NaN or Inf) and count as wrong; {_remedy(result)}",
              file=sys.stderr)  # fmt: skip
    return 1 if result.nonfinite else 0


def _remedy(result: CellResult) -> str:
    """What to try where answers are not finite."""
    if result.cell.method == "source":
        return "the model itself gives them: check its weights and its input, poem verify names causes"
    return "see whether --method source has them too; if not, try a smaller --lr"


def _cell(args: argparse.Namespace) -> Cell:
    """Build the cell from the file, with the options on top."""
    from poem.bench.cell import merge_fields, read_cell
    from poem.cli._cell_input import apply_assignments, parse_assignments
    from poem.recipes.methods import SAME_PRESET

    flags = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    stated = merge_fields({} if args.file is None else _read_fields(args.file, guard=bool(args.guard)), flags)
    values = apply_assignments(stated, parse_assignments(args.set))
    preset = values.get("preset", "imagenet")
    values["preset"] = (
        SAME_PRESET.get(preset, preset) if isinstance(preset, str) else preset
    )  # synonyms would give one cell two keys
    missing = [name for name in ("base", "data", "method") if name not in values]
    if missing:
        options = " ".join(f"--{name}" for name in missing)
        raise ValueError(
            f"expected {options}, or a file with a cell, as in "
            "poem run --base digits-bn --data digits-test --method poem --corruption fog --preset cifar"
        )
    cell = read_cell(values)
    _check_names(cell)
    return cell


def _check_names(cell: Cell) -> None:
    """Raise for unknown names of base, data, method and scenario before anything is opened."""
    from poem import zoo
    from poem._util import outside
    from poem.streams.datasets import DATASETS, canonical

    zoo.base(cell.base)
    if (name := canonical(cell.data)) not in DATASETS:
        outside.load("data set", name)
    cell.recipe()
    cell.order()


GUARD_SETTINGS = "; settings of a guard are Python's: poem.adapt(model, guard={...})"


def _read_fields(path: Path, *, guard: bool) -> dict[str, Any]:
    """Read the fields of a cell from a JSON file of a cell or of a result; `guard` if the command asks for one."""
    from poem.cli._cell_input import read_cell_json

    if not path.exists():
        raise ValueError(
            f"expected CELL.json, a file with a cell, got {path}, which is not there; names go with options, as in "
            f"--base digits-bn, other fields with --set FIELD=VALUE{GUARD_SETTINGS if guard else ''}"
        )
    values = read_cell_json(path, "a cell as JSON")
    if not isinstance(values, dict):
        raise ValueError(f"expected one cell in {path}, got a {type(values).__name__}; a list goes to poem bench")
    found = values["cell"] if "schema" in values and "cell" in values else values
    if not isinstance(found, dict):
        raise ValueError(f"expected one cell in {path}, got a {type(found).__name__} in its place")
    return dict(found)


def _result_text(result: CellResult) -> str:
    from poem.streams.card import Card

    lines = [str(Card.from_dict(result.card)), "", f"{result.cell.label}, key {result.key}"]
    units = {"nll": "nats", "entropy_before": "nats", "entropy_after": "nats"}
    lines.append(f"{'n':<16}{result.ledger['images']:10d} images")
    lines += [f"{name:<16}{value:10.3f} {units.get(name, '%')}" for name, value in result.metrics.items()]
    lines += _shift_lines(result.domains)
    lines += [f"{'not finite':<16}{result.nonfinite:10d} answers"] if result.nonfinite else []
    lines += [f"{name:<16}{value:10.1f}" for name, value in result.timing.items() if name == "images_per_s"]
    lines += [f"{name:<16}{value:10d} images" for name, value in result.ledger.items() if name.endswith("wards")]
    lines += [f"note: {note}" for note in result.notes]
    if result.cell.method != "source":
        lines.append("the same with --method source measures the model unadapted")
    return "\n".join(lines)


def _shift_lines(domains: dict[str, dict[str, float]]) -> list[str]:
    """A line for each shift of a stream with several, in the order in which they come."""
    if len(domains) < 2:
        return []
    width = max(len(name) for name in domains) + 2
    lines = [f"{'by shift':<{max(width, 16)}}{'top1':>10}{'ece':>10}{'nll':>10}{'images':>10}"]
    for name, found in domains.items():
        numbers = "".join(f"{found[key]:10.3f}" if key in found else f"{'-':>10}" for key in ("top1", "ece", "nll"))
        lines.append(f"{f'  {name}':<{max(width, 16)}}{numbers}{found.get('n', 0):10.0f}")
    return lines
