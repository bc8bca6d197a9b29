"""What `poem bench` and `poem reproduce` share: options, the printed plan, and the sweep with its exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poem._util.limits import MAX_PROCESSES, SEED_RANGE, available_cores
from poem.cli import _option_checks as checks
from poem.cli._option_checks import path_argument

if TYPE_CHECKING:
    from poem.bench.cell import Cell
    from poem.bench.load_cell import Machine
    from poem.bench.result import CellResult
    from poem.bench.runners import Runner
    from poem.bench.store import Store
    from poem.bench.suites import Suite
    from poem.bench.sweep import SweepOutcome

RESULTS = Path("poem-results")
"""Folder of results by default, with one folder in it for each scale."""
DEFAULT_SCALE = "tiny"
ABORTED = 3
"""Exit code of a sweep that could not go on: no room for a result, or workers that do not start."""


def add_suite_options(parser: argparse.ArgumentParser, title: str, default_scale: str) -> None:
    """Add the options that change the cells of a suite; `suite_settings` reads them."""
    what = parser.add_argument_group(title)
    what.add_argument("--scale", help=f"tiny, cifar10 or full; default: {default_scale}")
    what.add_argument("--limit", type=int, metavar="N", help="at most N images of each domain")
    what.add_argument("--methods", nargs="+", metavar="NAME", help="only rows of these methods or names, as '*poem*'")
    what.add_argument("--seeds", nargs="+", type=int, metavar="N", help="instead of the suite's own")
    what.add_argument("--corruptions", nargs="+", metavar="NAME", help="only these of the suite's corruptions")
    what.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of every cell; may be repeated"
    )
    what.add_argument(
        "--chosen", type=path_argument, metavar="FILE", help="learning rates by base and method, from poem choose"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both commands have."""
    add_suite_options(parser, "what to measure (flags > suite file > scale)", DEFAULT_SCALE)
    where = parser.add_argument_group("where")
    where.add_argument("-o", "--out", type=path_argument, metavar="FOLDER", help=f"results; default: {RESULTS}/SCALE")
    where.add_argument("--root", help="data; default: $POEM_DATA, on a cluster each node's own")
    where.add_argument("--weights", metavar="FOLDER", help="weight files; default: $POEM_DATA, then as downloaded")
    where.add_argument("--device", nargs="+", default=["cpu"], help="cpu, cuda for every GPU, or cuda:0 cuda:1 ...")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--engine", choices=["inline", "workers", "ray"], help="default: workers if more than one helps, else inline"
    )
    how.add_argument("--workers", type=int, metavar="N", help="processes; default: one per GPU, or cores / threads")
    how.add_argument(
        "--loaders", type=int, metavar="N", help="loader processes of each; default: up to 16 on a GPU, 0 on a CPU"
    )
    how.add_argument("--address", help="of a Ray cluster, or 'auto'; default: Ray on this machine only")
    how.add_argument(
        "--gpus", type=float, metavar="N", help="GPUs of a Ray task, fractions too; default: 1 on cuda, else 0"
    )
    how.add_argument(
        "--retries", type=int, default=2, metavar="N", help="further tries of a cell whose process died; default: 2"
    )
    how.add_argument(
        "--rerun", nargs="+", metavar="PATTERN",
        help="measure again, though finished, cells of these methods, bases, data or modules, as 'mine*'",
    )  # fmt: skip
    how.add_argument("--keep-going", action="store_true", help="run although weights or data of some cells are missing")
    how.add_argument("--dry-run", action="store_true", help="print the plan and an estimate of time, run nothing")
    how.add_argument("--json", action="store_true", help="print the cells as a JSON list, for poem bench FILE.json")


def check_options(args: argparse.Namespace) -> None:
    """Raise for option values that make no sense, before suites are read."""
    checks.check_range(args, 0, MAX_PROCESSES, "loaders")
    checks.check_range(args, 0, None, "retries")
    checks.check_range(args, *SEED_RANGE, "seeds")
    checks.check_finite(args, "gpus")
    if args.workers is not None and args.workers > MAX_PROCESSES:
        checks.check_range(args, 1, MAX_PROCESSES, "workers")
    checks.check_devices(*args.device, here=args.engine != "ray")
    if args.engine != "ray":
        checks.check_exists(args, "weights")


def scale_of(args: argparse.Namespace) -> str:
    """The scale given by `--scale`, or the smallest."""
    return args.scale or DEFAULT_SCALE


def suite_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `poem.bench.suites.load` that the options give."""
    from poem.bench.analysis.choose_lr import read
    from poem.cli._cell_input import parse_assignments

    return {
        "limit": args.limit, "methods": args.methods, "seeds": args.seeds, "corruptions": args.corruptions,
        "changes": parse_assignments(args.set), "chosen": None if args.chosen is None else read(args.chosen),
    }  # fmt: skip


def load_suites(args: argparse.Namespace, names: Sequence[str]) -> list[Suite]:
    """Load suites by name with the options applied; one that the options leave no cell of is left out."""
    from poem.bench.suites import NothingLeftError, load

    found, settings = [], suite_settings(args)
    for name in names:
        try:
            found.append(load(name, scale_of(args), **settings))
        except NothingLeftError as error:
            if len(names) == 1:
                raise
            print(f"left out: {error}", file=sys.stderr)
    if not found:
        raise ValueError("none of these suites has a cell that the flags leave; ask for more methods or corruptions")
    return found


def unique_cells(suites: Sequence[Suite]) -> list[Cell]:
    """Every cell of some suites once, though several tables may show it."""
    return list({placed.cell.key: placed.cell for suite in suites for placed in suite.placed}.values())


def read_cells(path: Path, args: argparse.Namespace) -> list[Cell]:
    """Read cells from a JSON file that `--json` wrote, with the options applied; needs no suite files."""
    from fnmatch import fnmatchcase

    from poem.bench.cell import read_cell
    from poem.cli._cell_input import apply_assignments, parse_assignments, read_cell_json

    for flag in ("scale", "chosen"):
        if getattr(args, flag) is not None:
            raise ValueError(f"--{flag} shapes suites, and {path} holds cells; give it where you make the list")
    values = read_cell_json(path, "a JSON list of cells")
    if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
        raise ValueError(f"expected a JSON list of cells in {path}; poem bench SUITE --json prints one")
    assignments = parse_assignments(args.set)
    found = [_limited(read_cell(apply_assignments(each, assignments)), args.limit) for each in values]
    kept = [
        cell
        for cell in found
        if args.methods is None or any(fnmatchcase(cell.method, pattern) for pattern in args.methods)
        if args.seeds is None or cell.seed in args.seeds
        if args.corruptions is None or set(cell.corruptions) <= set(args.corruptions)
    ]
    if not kept:
        raise ValueError(f"no cell of {path} is left by the flags; it has {len(found)}")
    return list({cell.key: cell for cell in kept}.values())


def _limited(cell: Cell, limit: int | None) -> Cell:
    """The cell with at most `limit` images of each domain, stream and source data, as suites apply `--limit`."""
    from dataclasses import replace

    if limit is None:
        return cell
    options = {name: min(limit, value) if name == "length" else value for name, value in cell.options}
    return replace(cell, n=limit, source_images=min(limit, cell.source_images), options=tuple(sorted(options.items())))


def results_folder(args: argparse.Namespace, name: str) -> Path:
    """The folder given by `--out`, or `poem-results/NAME`."""
    folder: Path = args.out if args.out is not None else RESULTS / name
    return folder


def make_runner(args: argparse.Namespace, todo: Sequence[Cell]) -> Runner:
    """Build the runner given by `--engine`; by default workers, or inline where one process on a CPU is enough."""
    from poem.bench.runners import Inline, Ray, Workers

    devices = _devices(args.device) if args.engine != "ray" else args.device
    count = worker_count(args, devices, todo)
    machine = _make_machine(args, devices[0])
    # After a CUDA error a process cannot use its GPU any more: a worker is replaced, this process would not be.
    kind = args.engine or ("workers" if count > 1 or devices != ["cpu"] else "inline")
    if args.address is not None and kind != "ray":
        raise ValueError(f"--address names a Ray cluster, got --engine {kind}; add --engine ray")
    if kind == "ray":
        return Ray(machine=machine, address=args.address, cpus=args.workers, gpus=args.gpus, retries=args.retries)
    if kind == "workers":
        return Workers(machine=machine, count=count, devices=tuple(devices), retries=args.retries)
    return Inline(machine=machine)


def worker_count(args: argparse.Namespace, devices: Sequence[str], todo: Sequence[Cell]) -> int:
    """Number of worker processes: `--workers`, or one per GPU, or available cores / threads of a cell."""
    if args.workers is not None:
        if args.workers < 1:
            raise ValueError(f"expected --workers of at least 1, got {args.workers}; leave it out for one per core")
        return int(args.workers)
    if devices != ["cpu"]:
        return len(devices)
    return max(1, min(available_cores() // max((cell.threads for cell in todo), default=1), len(todo)))


def _devices(names: Sequence[str]) -> list[str]:
    import torch

    found = checks.check_devices(*names)
    if found == ["cuda"]:
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return found


def run_sweep(args: argparse.Namespace, todo: Sequence[Cell], store: Store, names: Sequence[str] = ()) -> int:
    """Run the sweep with progress, print its outcome, and return the exit code.

    Names of suites are recorded in the store, for `poem report`.
    """
    from contextlib import suppress

    from poem._util.files import check_folder_writable
    from poem._util.log_level import errors_only
    from poem.bench.sweep import CannotWriteError, sweep
    from poem.cli._sweep_progress import SweepProgress

    check_folder_writable(store.folder)
    again = _rerun(args, todo)
    runner = make_runner(args, todo)
    if not args.keep_going:
        _check_requirements(args, todo, store)
    print(f"{len(todo)} cells, results in {store.folder}", file=sys.stderr)
    for warning in _changed_code(args, todo, store):
        print(warning, file=sys.stderr)
    if names:
        with suppress(OSError), store.lock():  # a folder that cannot be written is reported by the sweep
            store.save_request(names, scale_of(args), suite_settings(args))
    try:
        with errors_only(not args.verbose), SweepProgress() as progress:
            outcome = sweep(todo, store, runner=runner, on_event=progress, again=lambda cell: cell.key in again)
    except (CannotWriteError, ChildProcessError) as error:
        print(f"poem {args.command}: {error}", file=sys.stderr)
        return ABORTED
    print(outcome)
    _print_problems(outcome, store)
    return outcome.code


def _check_requirements(args: argparse.Namespace, todo: Sequence[Cell], store: Store) -> None:
    """Raise before the first cell if weights or data are missing, with everything missing in one message."""
    from poem.bench.requirements import check_requirements

    if _on_cluster(args):
        return
    found = check_requirements(_unfinished(args, todo, store), _make_machine(args))
    if found.missing:
        raise FileNotFoundError(f"{found}\nnothing was run; --keep-going runs the cells that lack nothing")


def _on_cluster(args: argparse.Namespace) -> bool:
    """Whether other machines run the cells, each with its own weights and data."""
    return args.address is not None


def _finished(args: argparse.Namespace, todo: Sequence[Cell], store: Store) -> dict[str, CellResult]:
    """Results by the key of the cell: those of today's recipe and weights that are not to be measured again.

    Any weights count where a cluster has its own.
    """
    from functools import partial

    from poem.bench.load_cell import weights_sha256

    weights = None if _on_cluster(args) else partial(weights_sha256, machine=_make_machine(args))
    again = _rerun(args, todo)
    found = {cell.key: store.finished(cell, weights) for cell in todo if cell.key not in again}
    return {key: result for key, result in found.items() if result is not None}


def _unfinished(args: argparse.Namespace, todo: Sequence[Cell], store: Store) -> list[Cell]:
    """The cells that are to be run."""
    finished = _finished(args, todo, store)
    return [cell for cell in todo if cell.key not in finished]


def _rerun(args: argparse.Namespace, todo: Sequence[Cell]) -> set[str]:
    """Keys of the cells that `--rerun` names by method, base, data, or module of one of them or of a part."""
    from fnmatch import fnmatchcase

    from poem._util.nearest import nearest_hint

    if not args.rerun:
        return set()
    names = {cell.key: _names_of(cell) for cell in todo}
    known = sorted(set().union(*names.values()))
    for pattern in args.rerun:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ValueError(f"--rerun: no method, base, data or module of a cell is like {pattern!r}; "
                             f"{nearest_hint(pattern, known)}")  # fmt: skip
    return {
        key for key, found in names.items() if any(fnmatchcase(name, each) for name in found for each in args.rerun)
    }


def _names_of(cell: Cell) -> set[str]:
    from poem.bench.provenance import outside_modules

    try:
        modules = outside_modules(cell, cell.recipe())
    except (ValueError, TypeError):  # no such recipe: the cell will fail
        modules = set()
    return {cell.method, cell.base, cell.data, *modules}


def _changed_code(args: argparse.Namespace, todo: Sequence[Cell], store: Store) -> list[str]:
    """Warnings about finished cells that were measured with other code of a module than today's."""
    from poem.bench.provenance import changed_code

    found: dict[tuple[str, str, str], int] = {}
    for result in _finished(args, todo, store).values():
        for module, (then, now) in changed_code(result).items():
            found[module, then, now] = found.get((module, then, now), 0) + 1
    return [
        f"{count} finished {'cell was' if count == 1 else 'cells were'} measured with other code of the module "
        f"{module} (sha256 {then[:8]} then, {now[:8]} now); --rerun {module} measures what uses it again"
        for (module, then, now), count in found.items()
    ]


def _make_machine(args: argparse.Namespace, device: str = "cpu") -> Machine:
    from poem.bench.load_cell import Machine

    return Machine(root=args.root, weights=args.weights, device=device, workers=args.loaders)


def _print_problems(outcome: SweepOutcome, store: Store) -> None:
    """Print failed cells with reasons, cells with NaN answers, unreadable and edited results, and an interrupt."""
    if outcome.failed:
        why = store.failures()
        print(f"{len(outcome.failed)} cells failed; the same command tries them again:", file=sys.stderr)
        alike: dict[str, list[Cell]] = {}
        for cell in outcome.failed:
            alike.setdefault(why[cell.key].reason, []).append(cell)
        for reason, cells in list(alike.items())[:10]:
            more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
            print(f"  {cells[0].label}{more}: {reason}", file=sys.stderr)
        print(f"their tracebacks: {store.cells}/*/*/*.failed.json", file=sys.stderr)
    for cell in outcome.nonfinite[:10]:
        if (result := store.finished(cell)) is not None:
            count = f"{result.nonfinite} of {result.card['total']}"
            print(f"{cell.label}: {count} answers were not finite (NaN or Inf) and count as wrong", file=sys.stderr)
    for reason in store.broken.values():
        print(f"not a result, moved aside or left alone: {reason}", file=sys.stderr)
    for message in store.edited.values():
        print(message, file=sys.stderr)
    if outcome.interrupted:
        print("stopped; the same command goes on", file=sys.stderr)


def print_plan(args: argparse.Namespace, suites: Sequence[Suite], todo: Sequence[Cell], store: Store) -> int:
    """Print the suites' sizes, how many cells are finished and an estimate of time; or the cells as JSON.

    Returns the exit code: that of the run where weights or data are missing, else 0.
    """
    import json

    from poem._util.progress import duration
    from poem.bench.estimate import Rates, data_sizes, image_count, timed_speeds
    from poem.bench.requirements import check_requirements
    from poem.streams.datasets.sources import gigabytes

    if args.json:
        print(json.dumps([cell.to_dict() for cell in todo], indent=1))
        return 0
    for suite in suites:
        print(f"{suite.name}, scale {suite.scale}: {suite.title}")
        for group in dict.fromkeys(placed.group for placed in suite.placed):
            print(f"  {_group_summary([placed for placed in suite.placed if placed.group == group])}")
    left = _unfinished(args, todo, store)
    devices = args.device if args.engine == "ray" else _devices(args.device)
    rates = Rates.of(store.results(), devices[0])
    count = 1 if args.engine == "inline" else worker_count(args, devices, left)
    several = f"{count} processes" if count > 1 else "1 process"
    print(f"{len(todo)} cells, {sum(map(image_count, todo))} images; results in {store.folder}")
    print(f"{len(todo) - len(left)} finished, {len(left)} to run, {sum(map(image_count, left))} images")
    for warning in _changed_code(args, todo, store):
        print(warning)
    slowest = f", {slowest}" if (slowest := rates.slowest(left)) else ""
    print(f"about {duration(rates.seconds(left) / count)} with {several}{slowest}, {rates}")
    if not rates.count and (timed := timed_speeds(left, devices[0])):
        print(timed)
    if sizes := data_sizes(left):
        listed = ", ".join(f"{name} {gigabytes(size)}" for name, size in sizes.items())
        print(f"data as published: {listed}; poem data get NAME --root DIR downloads it")
    if left and _on_cluster(args):
        print("weights and data: not checked, each node of a cluster has its own")
    elif left:
        found = check_requirements(left, _make_machine(args), download=False)
        print(found)
        if found.missing:
            return 1 if args.keep_going else 2
    return 0


def _group_summary(placed: Sequence[Any]) -> str:
    bases = ", ".join(sorted({each.cell.base for each in placed}))
    rows, columns = ({getattr(each, name) for each in placed} for name in ("row", "column"))
    seeds, unique = {each.cell.seed for each in placed}, {each.cell.key for each in placed}
    size = f"{len(rows)} rows x {len(columns)} columns, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
    head = f"{placed[0].group} ({bases})" if placed[0].group else bases
    return f"{head}: {size}: {len(unique)} cells"
