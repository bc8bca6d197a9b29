"""Put newly measured cells into the result files, in the place of earlier ones.

    PYTHONPATH=src:benchmarks python -m auto.merge new.jsonl more.jsonl

A cell that a file has already (same network, row, stream, seed, batch size and number of samples) is replaced there; a
new one goes into the file that has most cells of its network, batch size and number of samples. A cell of another
stream than the earlier one, by its hash, is refused, and then no file is changed. Cells that failed are left out.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from auto.cells import key_of, read_cells
from poem._util.files import write_atomic

RESULTS = Path(__file__).resolve().parents[2] / "results" / "auto"
Cells = list[dict[str, Any]]


def merged(files: dict[Path, Cells], new: Cells) -> dict[Path, Cells]:
    """The files that change, with the new cells.

    Raises:
        ValueError: A cell is of another stream than the one that it would replace, or no file is for such cells.
    """
    at = {(*key_of(cell), cell["n"]): (path, place) for path, own in files.items() for place, cell in enumerate(own)}
    streams = {_stream(cell): cell["hash"] for own in files.values() for cell in own}
    changed: dict[Path, Cells] = {}
    for cell in new:
        known = streams.get(_stream(cell), cell["hash"])
        if known != cell["hash"]:
            raise ValueError(
                f"expected the stream {known} for {key_of(cell)}, got {cell['hash']}: other images or order"
            )
        path, place = at.get((*key_of(cell), cell["n"]), (None, None))
        path = path or _file_for(cell, files)
        own = changed.setdefault(path, list(files[path]))
        if place is None:
            at[(*key_of(cell), cell["n"])] = path, len(own)
            own.append(cell)
        else:
            own[place] = cell
    return changed


def _stream(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["net"], cell["stream"], cell["seed"], cell["batch"], cell["n"]


def _file_for(cell: dict[str, Any], files: dict[Path, Cells]) -> Path:
    alike = ("net", "stream", "batch", "n"), ("net", "batch", "n"), ("net", "batch")
    for fields in alike:
        wanted = [cell[field] for field in fields]
        counts = Counter(
            {path: sum([each[f] for f in fields] == wanted for each in own) for path, own in files.items()}
        )
        path = max(counts, key=lambda each: counts[each], default=None)
        if path is not None and counts[path]:
            return path
    raise ValueError(
        f"expected a file with cells of {cell['net']} at batch {cell['batch']}, found none; make one first"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge the given files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new", type=Path, nargs="+", help="files of auto.measure")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    files = {path: read_cells([path]) for path in sorted(args.results.rglob("*.jsonl"))}
    new = read_cells(args.new)
    for path, cells in merged(files, new).items():
        write_atomic(path, "".join(json.dumps(cell, separators=(",", ":")) + "\n" for cell in cells).encode())
        print(f"{path.relative_to(args.results)}: {len(cells)} cells, before {len(files[path])}")
    lines = sum(len(path.read_text().splitlines()) for path in args.new)
    print(f"{len(new)} cells merged, {lines - len(new)} left out; next: python -m auto.analyse")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
