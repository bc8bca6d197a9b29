"""Join the result files of the study into one compact file for each suite.

    PYTHONPATH=src:benchmarks python -m study.join NEW.jsonl ...

Writes results/study/SUITE.json, to which the new cells are added: `runs`, what the cells of a run have in common;
`left_out`, the number of cells of each part and network that were not measured; `cells`, one a line. Cells that
results/auto has are among them, with `from`. Each cell has `better` and `worse` beside its own bits: the samples that
it alone gets right, and source alone, on the same stream. Of two cells with the same key the later one counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from auto import streams
from auto.cells import Key, key_of, read_cells
from auto.paired import Paired

from poem.bench.sample_cells import read_bits
from study import parts
from study.measure import EARLIER, ROOT, parse, wanted

FORMAT = 1
FIELDS = (
    "net", "row", "stream", "seed", "batch", "n", "right", "better", "worse", "bits", "hash", "tree", "run", "from",
    "seconds", "before", "selected", "newly", "entropy_first", "entropy_last", "gradients",
)  # fmt: skip
"""The fields of a cell, in this order."""
Wanted = dict[tuple[Key, int], str]
"""Part of every cell of the study, by key and number of samples."""


def cells_of_study() -> Wanted:
    """Every cell that the study has, by the part that comes first."""
    found: Wanted = {}
    for entry in wanted(parse(["--again"])):
        for row in entry.names:
            found.setdefault((entry.key(row), streams.scored_count(entry.stream, entry.images)), entry.part)
    return found


def paired(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last cell of each key, number of samples and stream, with its pairing to source.

    Raises:
        ValueError: A cell's bits are not those that it counts.
    """
    last = {(key_of(cell), cell["n"], cell["hash"]): cell for cell in cells}
    found = []
    for (key, n, stream), cell in last.items():
        bits = read_bits(cell["bits"], n)
        if int(bits.sum()) != cell["right"]:
            raise ValueError(f"expected {cell['right']} bits set in {key}, got {int(bits.sum())}")
        net, _, name, seed, batch = key
        source = last.get(((net, "source", name, seed, batch), n, stream))
        if source is None:  # which answers the same whatever the batch size
            source = last.get(((net, "source", name, seed, 64), n, stream))
        if source is not None:
            pair = Paired.of(bits, read_bits(source["bits"], n))
            cell = {**cell, "better": pair.better, "worse": pair.worse}
        found.append(cell)
    return found


def joined(
    paths: Sequence[Path], earlier: Sequence[Path] = EARLIER, suites: Sequence[Path] = ()
) -> dict[str, dict[str, Any]]:
    """The content of each suite's file: cells of results/auto, suites' files as they were, and new result files."""
    known = cells_of_study()
    own = [{**cell, "from": "results/auto"} for cell in read_cells(earlier)]
    runs: dict[str, Any] = {}
    for path in suites:
        held = json.loads(path.read_text())
        own += [cell for cell in held["cells"] if "from" not in cell]
        runs |= held["runs"]
    own += read_cells(paths)
    for path in paths:
        beside = path.with_suffix(".runs.json")
        runs |= json.loads(beside.read_text()) if beside.is_file() else {}
    cells = paired(cell for cell in own if (key_of(cell), cell["n"]) in known)
    there = {(key_of(cell), cell["n"]) for cell in cells}
    found = {}
    for suite, nets in parts.SUITES.items():
        mine = [cell for cell in cells if cell["net"] in nets]
        left: dict[str, dict[str, int]] = {}
        for (key, n), part in known.items():
            if key[0] in nets and (key, n) not in there:
                left.setdefault(part, {}).setdefault(key[0], 0)
                left[part][key[0]] += 1
        used = {cell.get("run") for cell in mine}
        found[suite] = {
            "format": FORMAT, "suite": suite, "runs": {name: run for name, run in runs.items() if name in used},
            "left_out": left, "cells": sorted(mine, key=_place),
        }  # fmt: skip
    return found


def _place(cell: dict[str, Any]) -> tuple[Any, ...]:
    net, row, stream, seed, batch = key_of(cell)
    nets = [each for own in parts.SUITES.values() for each in own]
    return nets.index(net), -batch, stream, row, seed, cell["n"]


def text(suite: dict[str, Any]) -> str:
    """A suite's file: JSON, one cell a line."""
    head = {name: value for name, value in suite.items() if name != "cells"}
    lines = [
        json.dumps({name: cell[name] for name in FIELDS if name in cell}, separators=(",", ":"))
        for cell in suite["cells"]
    ]
    return json.dumps(head, indent=1)[:-2] + ',\n "cells": [\n' + ",\n".join(lines) + "\n]\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="*", help="result files of study.measure, the oldest first")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "study")
    parser.add_argument("--alone", action="store_true", help="without the cells of results/auto: for other images")
    args = parser.parse_args(arguments)
    if args.alone and args.out == parser.get_default("out"):
        parser.error(f"expected --out beside --alone, a folder of its own: {args.out} holds the cells of results/auto")
    args.out.mkdir(parents=True, exist_ok=True)
    there = [path for name in parts.SUITES if (path := args.out / f"{name}.json").is_file()]
    for name, suite in joined(args.paths, () if args.alone else EARLIER, there).items():
        path = args.out / f"{name}.json"
        if args.alone and not suite["cells"]:
            continue
        path.write_text(text(suite))
        left = sum(sum(own.values()) for own in suite["left_out"].values())
        print(f"{path.name}: {len(suite['cells'])} cells, {left} left out, {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
