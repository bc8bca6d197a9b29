"""Compare the speed of two checkouts: rows of `speed.py`, measured in turn on one machine.

    python benchmarks/two_trees.py OLD NEW --out FILE [--turns 3] [arguments of speed.py]

OLD and NEW are folders with `src` and `benchmarks`. Each turn measures the same rows of both, each in a process of its
own; the ratio is of the fastest turn of each, because other load on the machine only slows a turn down.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = ["--nets", "resnet50-bn", "--batches", "64,1", "--methods", "poem1,poem2", "--modes", "eager,captured,bf16",
        "--no-forward", "--no-ratio", "--seconds", "0.4"]  # fmt: skip


def rows(tree: Path, words: list[str]) -> dict[str, float]:
    """Images per second by row of `speed.py`, run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, str(tree / "benchmarks" / "speed.py"), *words, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.exists():
            raise SystemExit(f"{tree}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        found = json.loads(out.read_text())["rows"]
    return {
        f"{row['net']} {row['method']} {row['mode']} batch {row['batch']}": row["images_per_s"]
        for row in found
        if row.get("images_per_s")
    }


def main() -> None:
    """Read the command line, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=3)
    args, words = parser.parse_known_args()
    words = [word for word in words if word != "--"] or ["--device", "cuda", *ROWS]
    best: dict[str, dict[str, float]] = {"old": {}, "new": {}}
    table: dict[str, dict[str, float | None]] = {}
    for turn in range(args.turns):
        for name in ("old", "new") if turn % 2 == 0 else ("new", "old"):
            for row, speed in rows(getattr(args, name), words).items():
                best[name][row] = max(speed, best[name].get(row, 0.0))
        table = {row: {"old": old, "new": best["new"].get(row), "new/old": round(best["new"].get(row, 0.0) / old, 4)}
                 for row, old in best["old"].items()}  # fmt: skip
        done = {"command": " ".join(sys.argv), "rows": words, "turns": turn + 1, "images_per_second": table}
        args.out.write_text(json.dumps(done, indent=1))  # after every turn, so that a timeout keeps the turns before it
    for row, each in table.items():
        print(f"{row:<40} {each['old']:10.1f} {each['new'] or 0:10.1f}  {each['new/old']:.3f}")


if __name__ == "__main__":
    main()
