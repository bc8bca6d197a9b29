"""Rows for the leaderboard from results of `poem run` and `poem bench`: collected in one file, and checked.

    collect(Path("mine"), Path("results/leaderboard/mine.json"))
    cells = read_rows(Path("results/leaderboard/mine.json"))

A file holds results as they were measured, each with its checksum. A row is shown beside `source` on the same streams,
so that the file needs both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from poem._util.files import read_json, write_atomic
from poem.bench.cell import WEIGHTS_DIGITS, Cell, recorded_keys
from poem.bench.result import CellResult, checksum, latest
from poem.bench.sample_cells import SampleCell, read_bits
from poem.bench.store import Store
from poem.streams.corruptions import CORRUPTIONS

VERSIONS = ("poem", "torch", "python")
"""Versions that a row's provenance has to state."""


def collect(folder: Path, out: Path) -> int:
    """Write the results of a folder of `poem bench` as one file, of each cell the last one; returns their number.

    Raises:
        ValueError: The folder holds no results, or some that no leaderboard takes; the message says why.
    """
    store = Store(folder)
    found = list(latest(store.results(), lambda result: result.key).values())
    if not found:
        raise ValueError(f"expected a folder of results, got {folder}; poem bench makes one")
    check_rows(found)
    results = [{**result.to_dict(), "checksum": checksum(result.to_dict())} for result in found]
    text = json.dumps({"schema": 1, "results": results}, separators=(",", ":"), allow_nan=False)
    write_atomic(out, text.replace('{"schema":1,"key"', '\n{"schema":1,"key"') + "\n")
    return len(found)


def read_results(path: Path) -> list[CellResult]:
    """The results of a file that `collect` wrote, or of a single one of `poem run -o`.

    Raises:
        ValueError: The file holds something else; the message names it.
    """
    held = read_json(path)
    if isinstance(held, Mapping) and "cell" in held:
        return [CellResult.load(path)]
    if not isinstance(held, Mapping) or not isinstance(held.get("results"), list) or held.get("schema") != 1:
        raise ValueError(f"expected results of schema 1 in {path}, got another file; poem report FOLDER --collect FILE")
    found = []
    for number, values in enumerate(held["results"], 1):
        try:
            if not isinstance(values, Mapping):
                raise ValueError(f"expected an object, got a {type(values).__name__}")
            found.append(CellResult.from_dict(values))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise ValueError(f"{path}, result {number}: {error}") from error
    return found


def read_rows(path: Path) -> list[SampleCell]:
    """The cells of a file of results, each with its checksum, after `check_rows`.

    Raises:
        ValueError: A result that no leaderboard takes; the message names file, cell and reason.
    """
    with recorded_keys({}):
        found = read_results(path)
        try:
            for result in found:
                if result.intact is None:
                    raise ValueError(
                        f"{result.cell.label}: expected a checksum beside the result, got none; "
                        "poem report FOLDER --collect FILE writes it"
                    )
            check_rows(found)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return [sample_cell(result, path.name) for result in found]


def check_rows(results: Iterable[CellResult]) -> None:
    """Raise unless results can be rows: unchanged since measured, with provenance, weights, samples and source.

    Raises:
        ValueError: The first reason against it, with the cell that it is about.
    """
    results = list(results)
    streams = {(_stream_hash(each), _protocol(each)) for each in results if each.cell.method == "source"}
    for result in results:
        if words := _refused(result):
            raise ValueError(f"{result.cell.label}: {words}")
        if (_stream_hash(result), _protocol(result)) not in streams:
            raise ValueError(
                f"{result.cell.label}: expected source on the same stream beside it, with the same eta, ratio and "
                "precision; add a row with method: source"
            )
    if not any(each.cell.method != "source" for each in results):
        raise ValueError("expected a method beside source, got source alone")


def _refused(result: CellResult) -> str:
    """Why a result cannot be a row; empty if it can."""
    facts = result.provenance
    if result.intact is False:
        return "its checksum does not fit: the file was edited after it was measured"
    missing = [name for name in VERSIONS if not facts.get(name)]
    if missing:
        return f"its provenance lacks the version of {', '.join(missing)}; measure it again"
    if facts.get("dirty"):
        return "measured from a worktree with changes that are not committed; commit them and measure it again"
    if result.weights_sha256 is None or result.cell.weights == "random":
        return "its weights are random or unknown; name the file of weights that it was measured with"
    if not {"right", "labels"} <= set(result.samples):
        return "it does not say which samples were right; measure it again with this version"
    total = result.card.get("total")
    if not isinstance(total, int) or total < 1:
        return f"expected the number of images in its card, got {total!r}"
    try:
        right = int(read_bits(result.samples["right"], total).sum())
    except ValueError as error:
        return str(error)
    if abs(100 * right / total - result.metrics["top1"]) > 0.01:
        return f"{right} of {total} samples are right, and top1 is {result.metrics['top1']:.2f}: the file was edited"
    return ""


def _stream_hash(result: CellResult) -> str:
    """Digits of a hash of everything that makes a stream and the network that answers it."""
    cell = result.cell
    told = [
        cell.base, result.weights_sha256, cell.data, cell.scenario, cell.corruptions, cell.severity, cell.seed, cell.n,
        cell.batch_size, cell.options, cell.dataset, result.card.get("provenance"), result.samples.get("labels"),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()[:16]


def row_name(result: CellResult) -> str:
    """The name of a result's row: method, guard, changes, and what is not the method's own: rate, source images.

    `source` takes no steps: a rate that its cell states is left out, so that it is the row others are compared with.
    """
    cell = result.cell
    rate = [] if cell.lr is None or cell.method == "source" else [f"lr {cell.lr:g}"]
    read = bool(result.ledger.get("source_images")) or any("without source images" in note for note in result.notes)
    images = [f"{cell.source_images} source images"] if read and cell.source_images != Cell.source_images else []
    return ", ".join([cell.method_label, *(f"{name} {value}" for name, value in cell.changes), *rate, *images])


def stream_name(cell: Cell) -> str:
    """The name of a cell's stream, which tells scenario, shifts, severity, and what else was chosen."""
    shift = f"{len(CORRUPTIONS)} shifts" if cell.corruptions == tuple(CORRUPTIONS) else "+".join(cell.corruptions)
    shift = shift if shift == "clean" else f"{shift}-{cell.severity}"
    chosen = [f"{name} {value}" for name, value in cell.options]
    if cell.scenario == "single":
        return ", ".join([shift, *chosen])
    chosen = [*([] if cell.n is None else [f"{cell.n} images of each"]), *chosen]
    return ", ".join([f"{cell.scenario} of {shift}", *chosen])


def _protocol(result: CellResult) -> str:
    """What has to be equal beside the stream for two rows to be compared, in words."""
    cell = result.cell
    told = [f"poem bench: {cell.data}", *(f"{name} {value}" for name, value in cell.dataset), f"preset {cell.preset}"]
    told += [f"weights {(result.weights_sha256 or '')[:WEIGHTS_DIGITS]}"]
    told += [f"online: eta {cell.eta:g}, ratio {cell.ratio}"] if cell.eta else []
    told += [cell.precision] if cell.precision != Cell.precision else []
    return ", ".join(told)


def sample_cell(result: CellResult, file: str) -> SampleCell:
    """A result that passed `check_rows` as a cell of the leaderboard."""
    cell, facts, total = result.cell, result.provenance, int(result.card["total"])
    once = cell.scenario != "label-shift" and total == result.card.get("n")
    bits = read_bits(result.samples["right"], total)
    return SampleCell(
        net=cell.base, row=row_name(result), stream=stream_name(cell), seed=cell.seed, batch=cell.batch_size, n=total,
        right=int(bits.sum()), hash=_stream_hash(result), bits=bits, seconds=result.timing.get("adapt_s"),
        protocol=_protocol(result), images="once" if once else "repeated",
        provenance=tuple(sorted({
            "command": f"poem run on the cells of {file}", "file": file,
            "tree": str(facts.get("commit") or "installed package"), "poem": str(facts["poem"]),
            "torch": str(facts["torch"]), "device": str(result.host.get("device", "")),
            "weights": str(result.weights_sha256)[:WEIGHTS_DIGITS], "started": str(result.host.get("started", ""))[:10],
        }.items())),
    )  # fmt: skip
