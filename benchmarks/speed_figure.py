"""Draw POEM's speed by batch size: docs/speed_curves.png, from a curves.json of `benchmarks/gpu_check.sh`.

    python benchmarks/speed_figure.py [results/speed/curves.json]

A file of another tree is refused, as on the pages (`tree_hash.py`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from tree_hash import ROOT, tree_hash  # noqa: E402

LINES = (("#2563a8", "o"), ("#23815a", "s"), ("#a5331c", "^"), ("#6b6862", "D"), ("#8a5a00", "v"))
"""Colour and marker of each network: either tells them apart."""


def main(arguments: list[str]) -> int:
    """Draw images per second, and milliseconds of a call, over the batch size."""
    path = Path(arguments[0]) if arguments else ROOT / "results" / "speed" / "curves.json"
    content = json.loads(path.read_text())
    if content.get("tree") != tree_hash():
        print(f"expected a file of this tree, {path.name} is of another; measure again", file=sys.stderr)
        return 1
    from matplotlib.figure import Figure

    rows = [row for row in content["rows"] if row.get("curve") == "batch" and row["status"] == "ok"]
    figure = Figure(figsize=(9, 3.4), facecolor="white", dpi=150, layout="constrained")
    for axes, key, title in zip(
        figure.subplots(1, 2), ("images_per_s", "median_ms"), ("images per second", "ms of a call"), strict=True
    ):
        for net, (colour, marker) in zip(sorted({row["net"] for row in rows}), LINES, strict=False):
            points = sorted((row["batch"], row[key]) for row in rows if row["net"] == net)
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, color=colour, label=net)
        axes.set(xscale="log", yscale="log", xlabel="batch size", title=title)
        sizes = sorted({row["batch"] for row in rows})
        axes.set_xticks(sizes, map(str, sizes))
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    out = ROOT / "docs" / "speed_curves.png"
    figure.savefig(out, metadata={"Software": None})
    print(f"{out.relative_to(ROOT)}: POEM with one update, bf16, captured, {content['host']['device']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
