"""One line about a stage of `benchmarks/gpu_check.sh`, and its exit code.

    python benchmarks/gpu_verdict.py curves results/speed curves.json

The files that the stage's processes write are named: a stage fails if one is missing, unfinished or of another tree.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from tree_hash import tree_hash  # noqa: E402

Verdict = tuple[bool, str]


def contract(folder: Path, names: list[str]) -> Verdict:
    """Sums over the processes' logs; writes contract.json."""
    logs = [(folder / name).read_text() if (folder / name).is_file() else "" for name in names]
    ends = [text.strip().splitlines()[-1] if text.strip() else "" for text in logs]
    count = {word: sum(int(n) for end in ends for n in re.findall(rf"(\d+) {word}", end)) for word in WORDS}
    unfinished = sum(not re.search(r" in [\d.]+s", end) for end in ends)
    good = bool(logs) and count["passed"] > 0 and not count["failed"] and not count["error"] and not unfinished
    said = f"{count['passed']} tests of the contract passed on a GPU with fast=True, {count['failed']} failed"
    said += f", {count['error']} errors" if count["error"] else ""
    said += f", {unfinished} of {len(logs)} processes did not finish" if unfinished or not logs else ""
    if good:
        _write(folder / "contract.json", {"verdict": f"{said}.", **count})
    return good, said


WORDS = ("passed", "failed", "error")


def agreement(folder: Path, names: list[str]) -> Verdict:
    """Captured and eager within rounding; writes agreement.json with all rows."""
    parts, wrong = _read(folder, names)
    rows = [row for part in parts for row in part["rows"]]
    bad = [row for row in rows if not _agrees(row)]
    left = [job for part in parts for job in part["left"]]
    for row in bad:
        print(f"    {json.dumps(row)}")
    good = bool(rows) and not bad and not left and not wrong
    if good:
        facts = {key: parts[0].get(key) for key in ("device", "torch")}
        _write(folder / "agreement.json", {**facts, "rows": rows})
    far = [row["largest_difference_of_probabilities"] for row in rows if "error" not in row]
    said = (
        f"{len(rows)} comparisons, {len(bad)} differ, {len(left)} left out; largest difference of a probability "
        f"{max(far, default=float('nan')):.1g}"
    )
    return good, _with(said, wrong)


def _agrees(row: dict[str, Any]) -> bool:
    """Within rounding. What decides on the host is not captured, which a note says."""
    if "error" in row or not (row["captured"] or row["notes"]):
        return False
    return bool(row["largest_difference_of_probabilities"] <= ROUNDING and row["same_totals"])


ROUNDING = 1e-5
"""By how much a probability may differ between captured and eager, on every network."""


def speed(folder: Path, names: list[str]) -> Verdict:
    """The best share of the limit of every network; a row with an error, or one that time left out, fails."""
    return _rows(folder, names)


def curves(folder: Path, names: list[str]) -> Verdict:
    """Rows of the curves."""
    return _rows(folder, names)


def stream(folder: Path, names: list[str]) -> Verdict:
    """From files to answers: the best share of the adapter's speed, for clean images and each corruption."""
    files, wrong = _read(folder, names)
    rows = [row for file in files for row in file["rows"]]
    skipped = [each for file in files for each in file["skipped"]]
    best = {row["images"]: max(each["of_adapter"] for each in rows if each["images"] == row["images"]) for row in rows}
    shares = "".join(f"; {images} {share:.0%} of the adapter" for images, share in best.items())
    said = f"{len(rows)} rows, {len(skipped)} left out{shares}"
    return bool(rows) and not skipped and not wrong, _with(said, wrong)


def stacked(folder: Path, names: list[str]) -> Verdict:
    """Streams of single images as one batch: each method's share of one stream's speed, and the largest difference."""
    files, wrong = _read(folder, names)
    rows = [row for file in files for row in file["rows"]]
    bad = [row for row in rows if row["why_not"] or not row["difference"] <= 1e-4]
    shares = "".join(f"; {row['method']} {row['ratio']:.0%} of one stream" for row in rows if not row["why_not"])
    return bool(rows) and not bad and not wrong, _with(f"{len(rows)} rows, {len(bad)} not as each alone{shares}", wrong)


def _rows(folder: Path, names: list[str]) -> Verdict:
    files, wrong = _read(folder, names)
    rows = [row for file in files for row in file["rows"]]
    bad = [row for row in rows if row["status"] == "error"]
    for row in bad:
        print(f"    {row['net']} {row['batch']} {row['method']} {row['mode']}: {row['reason']}")
    for row in rows:
        if row["status"] == "ok" and not row.get("as_asked", True):
            print(f"    {row['net']} {row['batch']} {row['method']} {row['mode']}: {'; '.join(row['notes'])}")
    skipped = [each for file in files for each in file["skipped"]]
    shares = [
        f"{row['net']} batch {row['batch']} {row['method']} {row['share_of_limit']:.0%}"
        for row in rows if row["status"] == "ok" and row["mode"] == "bf16" and row.get("share_of_limit")
    ]  # fmt: skip
    said = f"{len(rows)} rows, {len(bad)} errors, {len(skipped)} left out{''.join(f'; {share}' for share in shares)}"
    return bool(rows) and not bad and not skipped and not wrong, _with(said, wrong)


def _read(folder: Path, names: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The files of this tree, and what is wrong with the others."""
    today, files, wrong = tree_hash(), [], [] if names else ["no file was named"]
    for name in names:
        content = json.loads((folder / name).read_text()) if (folder / name).is_file() else None
        if content is None:
            wrong.append(f"{name} is missing")
        elif content.get("tree") != today:
            wrong.append(f"{name} is of another tree")
        else:
            files.append(content)
            if not content.get("finished", True):
                wrong.append(f"{name} is unfinished")
    return files, wrong


def _with(said: str, wrong: list[str]) -> str:
    return "; ".join([said, *wrong])


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps({"tree": tree_hash(), **content}, indent=1) + "\n")


STAGES: dict[str, Callable[[Path, list[str]], Verdict]] = {
    "contract": contract, "agreement": agreement, "speed": speed, "curves": curves, "stream": stream,
    "stacked": stacked,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Print the line of a stage; 1 where it failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("folder", type=Path, help="where the stage's processes wrote their files")
    parser.add_argument("names", nargs="*", help="these files")
    args = parser.parse_args(arguments)
    good, said = STAGES[args.stage](args.folder, args.names)
    print(f"{args.stage}: {'passed' if good else 'FAILED'}: {said}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
