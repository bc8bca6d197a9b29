"""What `poem bench` and `poem reproduce` share: options, the grid before it is run, and the run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poem.cli import _values
from poem.cli._values import named_path

if TYPE_CHECKING:
    from poem.bench.cell import Cell
    from poem.bench.load_cell import Machine
    from poem.bench.runners import Runner
    from poem.bench.store import Store
    from poem.bench.suites import Suite
    from poem.bench.sweep import Outcome

HERE = Path("poem-results")
SCALE = "tiny"
BROKEN_OFF = 3
"""Exit code of a sweep that could not go on: no room for a result, or workers that do not start."""


def options(parser: argparse.ArgumentParser) -> None:
    """What both commands take."""
    what = parser.add_argument_group("what to measure (flags > suite file > scale)")
    what.add_argument("--scale", help="tiny, cifar10 or full; default: tiny")
    what.add_argument("--limit", type=int, metavar="N", help="at most N images of each domain")
    what.add_argument("--methods", nargs="+", metavar="NAME", help="these rows alone, as 'tent' or '*poem*'")
    what.add_argument("--seeds", nargs="+", type=int, metavar="N", help="instead of the suite's own")
    what.add_argument("--corruptions", nargs="+", metavar="NAME", help="of the suite's these alone")
    what.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="of every cell; may be repeated"
    )
    what.add_argument(
        "--chosen", type=named_path, metavar="FILE", help="learning rates by base and method, from poem choose"
    )
    where = parser.add_argument_group("where")
    where.add_argument("--out", type=named_path, metavar="FOLDER", help=f"results; default: {HERE}/SCALE, here")
    where.add_argument("--root", help="data; default: $POEM_DATA, on a cluster each node's own")
    where.add_argument("--weights", metavar="FOLDER", help="weight files; default: $POEM_DATA, then as downloaded")
    where.add_argument("--device", nargs="+", default=["cpu"], help="cpu, cuda for every GPU, or cuda:0 cuda:1 ...")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--engine", choices=["inline", "workers", "ray"], help="default: workers, where more than one helps"
    )
    how.add_argument("--workers", type=int, metavar="N", help="processes; default: one per GPU, or cores / threads")
    how.add_argument("--loaders", type=int, default=0, metavar="N", help="loader processes of each; default: 0")
    how.add_argument("--address", help="of a Ray cluster, or 'auto'; default: one on this machine alone")
    how.add_argument("--gpus", type=float, metavar="N", help="of a Ray task, parts too; default: 1 on cuda, else 0")
    how.add_argument("--retries", type=int, default=2, metavar="N", help="for a cell whose process died; default: 2")
    how.add_argument("--keep-going", action="store_true", help="though weights or data of some cells are missing")
    how.add_argument("--dry-run", action="store_true", help="print the grid and an estimate, run nothing")
    how.add_argument("--json", action="store_true", help="print the cells as a JSON list, for poem bench FILE.json")


def check(args: argparse.Namespace) -> None:
    """Refuse values that make no sense, before suites are read."""
    _values.within(args, 0, _values.MANY, "loaders")
    _values.within(args, 0, None, "retries")
    _values.within(args, *_values.SEEDS, "seeds")
    _values.finite(args, "gpus")
    if args.workers is not None and args.workers > _values.MANY:
        _values.within(args, 1, _values.MANY, "workers")
    _values.device(*args.device, here=args.engine != "ray")
    if args.engine != "ray":
        _values.existing(args, "weights")


def scale(args: argparse.Namespace) -> str:
    """The scale asked for, or the smallest."""
    return args.scale or SCALE


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """What flags say of cells, as `poem.bench.suites.load` takes it."""
    from poem.bench.analysis.choose_lr import read
    from poem.cli._fields import pairs

    return {
        "limit": args.limit, "methods": args.methods, "seeds": args.seeds, "corruptions": args.corruptions,
        "changes": pairs(args.set), "chosen": None if args.chosen is None else read(args.chosen),
    }  # fmt: skip


def suites(args: argparse.Namespace, names: Sequence[str]) -> list[Suite]:
    """The suites asked for, with every flag merged over them."""
    from poem.bench.suites import NothingLeftError, load

    found, settings = [], asked(args)
    for name in names:
        try:
            found.append(load(name, scale(args), **settings))
        except NothingLeftError as error:
            if len(names) == 1:
                raise
            print(f"left out: {error}", file=sys.stderr)
    if not found:
        raise ValueError("none of these suites has a cell that the flags leave; ask for more methods or corruptions")
    return found


def cells(found: Sequence[Suite]) -> list[Cell]:
    """Every cell of some suites once, however many places it fills."""
    return list({placed.cell.key: placed.cell for suite in found for placed in suite.placed}.values())


def listed(path: Path, args: argparse.Namespace) -> list[Cell]:
    """Cells from a file that `--json` wrote, with the flags merged over them; needs no suite files."""
    from fnmatch import fnmatchcase

    from poem._util.files import read_json
    from poem.bench.cell import read_cell
    from poem.cli._fields import pairs, with_fields

    for flag in ("scale", "chosen"):
        if getattr(args, flag) is not None:
            raise ValueError(f"--{flag} shapes suites, and {path} holds cells; give it where you make the list")
    try:
        values = read_json(path)
    except ValueError as error:
        raise ValueError(f"expected a JSON list of cells in {path}: {error}") from error
    if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
        raise ValueError(f"expected a JSON list of cells in {path}; poem bench SUITE --json prints one")
    changes = pairs(args.set)
    found = [_limited(read_cell(with_fields(each, changes)), args.limit) for each in values]
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
    """At most so many images of each domain, in a stream of stated length, and of source data, as in suites."""
    from dataclasses import replace

    if limit is None:
        return cell
    options = {name: min(limit, value) if name == "length" else value for name, value in cell.options}
    return replace(cell, n=limit, source_images=min(limit, cell.source_images), options=tuple(sorted(options.items())))


def folder(args: argparse.Namespace, name: str) -> Path:
    """Where results go."""
    chosen: Path = args.out if args.out is not None else HERE / name
    return chosen


def runner(args: argparse.Namespace, todo: Sequence[Cell]) -> Runner:
    """The runner that --engine names, or the one that suits this machine."""
    from poem.bench.runners import Inline, Ray, Workers

    devices = _devices(args.device) if args.engine != "ray" else args.device
    count = workers(args, devices, todo)
    machine = _machine(args, devices[0])
    # An error may leave a GPU of no use to its process: a worker is replaced, this process would not be.
    kind = args.engine or ("workers" if count > 1 or devices != ["cpu"] else "inline")
    if args.address is not None and kind != "ray":
        raise ValueError(f"--address names a Ray cluster, got --engine {kind}; add --engine ray")
    if kind == "ray":
        return Ray(machine=machine, address=args.address, cpus=args.workers, gpus=args.gpus, retries=args.retries)
    if kind == "workers":
        return Workers(machine=machine, count=count, devices=tuple(devices), retries=args.retries)
    return Inline(machine=machine)


def workers(args: argparse.Namespace, devices: Sequence[str], todo: Sequence[Cell]) -> int:
    """Processes at a time: as asked, one per GPU, or as many as the cores have room for."""
    import os

    if args.workers is not None:
        if args.workers < 1:
            raise ValueError(f"expected --workers of at least 1, got {args.workers}; leave it out for one per core")
        return int(args.workers)
    if devices != ["cpu"]:
        return len(devices)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // max((cell.threads for cell in todo), default=1), len(todo)))


def _devices(names: Sequence[str]) -> list[str]:
    import torch

    found = _values.device(*names)
    if found == ["cuda"]:
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return found


def run(args: argparse.Namespace, todo: Sequence[Cell], store: Store, names: Sequence[str] = ()) -> int:
    """Sweep with a bar, then say what became of it; gives the exit code. Names of suites are kept for `poem report`."""
    from contextlib import suppress

    from poem._util.files import check_folder
    from poem.bench.sweep import CannotWriteError, sweep
    from poem.cli._bar import Bar
    from poem.cli._quiet import quiet

    check_folder(store.folder)
    chosen = runner(args, todo)
    if not args.keep_going:
        _check_requirements(args, todo, store)
    print(f"{len(todo)} cells, results in {store.folder}", file=sys.stderr)
    if names:
        with suppress(OSError), store.lock():  # what is wrong with the folder is for the sweep to say
            store.save_request(names, scale(args), asked(args))
    try:
        with quiet(not args.verbose), Bar() as bar:
            outcome = sweep(todo, store, runner=chosen, on_event=bar)
    except (CannotWriteError, ChildProcessError) as error:
        print(f"poem {args.command}: {error}", file=sys.stderr)
        return BROKEN_OFF
    print(outcome)
    _say(outcome, store)
    return outcome.code


def _check_requirements(args: argparse.Namespace, todo: Sequence[Cell], store: Store) -> None:
    """Raise FileNotFoundError before the first cell where weights or data are missing; the message lists them all."""
    from poem.bench.requirements import check_requirements

    if _on_cluster(args):
        return
    found = check_requirements(_unfinished(args, todo, store), _machine(args))
    if found.missing:
        raise FileNotFoundError(f"{found}\nnothing was run; --keep-going runs the cells that lack nothing")


def _on_cluster(args: argparse.Namespace) -> bool:
    """Whether other machines run the cells, each with its own weights and data."""
    return args.address is not None


def _unfinished(args: argparse.Namespace, todo: Sequence[Cell], store: Store) -> list[Cell]:
    """The cells that have no result with the recipe and weights of today; any weights where a cluster has its own."""
    from functools import partial

    from poem.bench.load_cell import weights_sha256

    weights = None if _on_cluster(args) else partial(weights_sha256, machine=_machine(args))
    return [cell for cell in todo if store.finished(cell, weights) is None]


def _machine(args: argparse.Namespace, device: str = "cpu") -> Machine:
    from poem.bench.load_cell import Machine

    return Machine(root=args.root, weights=args.weights, device=device, workers=args.loaders)


def _say(outcome: Outcome, store: Store) -> None:
    """What failed and why, what answered with NaN, what is no result, what is left."""
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
    for words in store.broken.values():
        print(f"not a result, moved aside or left alone: {words}", file=sys.stderr)
    for words in store.edited.values():
        print(words, file=sys.stderr)
    if outcome.interrupted:
        print("stopped; the same command goes on", file=sys.stderr)


def show(args: argparse.Namespace, found: Sequence[Suite], todo: Sequence[Cell], store: Store) -> None:
    """The grid, what of it is finished, and an estimate; or the cells as JSON."""
    import json

    from poem.bench.estimate import Rates, image_count
    from poem.bench.requirements import check_requirements
    from poem.cli._bar import duration

    if args.json:
        print(json.dumps([cell.to_dict() for cell in todo], indent=1))
        return
    for suite in found:
        print(f"{suite.name}, scale {suite.scale}: {suite.title}")
        for group in dict.fromkeys(placed.group for placed in suite.placed):
            print(f"  {_line([placed for placed in suite.placed if placed.group == group])}")
    left = _unfinished(args, todo, store)
    devices = args.device if args.engine == "ray" else _devices(args.device)
    rates = Rates.of(store.results(), devices[0])
    count = 1 if args.engine == "inline" else workers(args, devices, left)
    several = f"{count} processes" if count > 1 else "1 process"
    print(f"{len(todo)} cells, {sum(map(image_count, todo))} images; results in {store.folder}")
    print(f"{len(todo) - len(left)} finished, {len(left)} to run, {sum(map(image_count, left))} images")
    slowest = f", {slowest}" if (slowest := rates.slowest(left)) else ""
    print(f"about {duration(rates.seconds(left) / count)} with {several}{slowest}, {rates}")
    if left and _on_cluster(args):
        print("weights and data: not looked for, each node of a cluster has its own")
    elif left:
        print(check_requirements(left, _machine(args), download=False))


def _line(placed: Sequence[Any]) -> str:
    bases = ", ".join(sorted({each.cell.base for each in placed}))
    rows, columns = ({getattr(each, name) for each in placed} for name in ("row", "column"))
    seeds, unique = {each.cell.seed for each in placed}, {each.cell.key for each in placed}
    size = f"{len(rows)} rows x {len(columns)} columns, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
    head = f"{placed[0].group} ({bases})" if placed[0].group else bases
    return f"{head}: {size}: {len(unique)} cells"
