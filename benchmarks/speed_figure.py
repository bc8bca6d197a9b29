"""Draw the curves of `benchmarks/gpu_check.sh`: docs/speed_curves.png and docs/speed_methods.png, from a curves.json.

    python benchmarks/speed_figure.py [results/speed/curves.json]

The first has POEM's speed and memory by batch size, the second methods by the share of samples selected. A file of
another tree is refused, as on the pages (`tree_hash.py`). Each picture says in its `Description` which tree it is of,
and in its `Comment` which rows. Reserved memory is not drawn: one process measures all rows, and what it had reserved
for earlier ones counts in each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from tree_hash import ROOT, tree_hash  # noqa: E402

Row = dict[str, Any]
CURVES, METHODS = "speed_curves.png", "speed_methods.png"
LINES = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#1f1d1a", "D"), ("#cc79a7", "v"), ("#e69f00", "P"))
"""Colour, of Okabe and Ito's, and marker of each network: either tells them apart."""
SHARES = ("#0072b2", "#7cc4ec", "#e8e8e8")
"""Colours of the shares selected, from dark to light in grey too."""
INK, RULE = "#1f1d1a", "#d9d4c8"
NAMES = {"poem1": "POEM, 1 update", "poem2": "POEM, 2 updates", "eata": "EATA", "sar": "SAR", "deyo": "DeYO",
         "roid": "ROID", "rotta": "RoTTA", "tent": "Tent"}  # fmt: skip
PANELS = (
    ("images_per_s", "speed, images/s"), ("median_ms", "median call, ms"),
    ("peak_allocated_mib", "peak allocated, MiB"),
)  # fmt: skip
EAGER = "////"
"""The hatch of rows that could not be captured."""
APART = "ReLU and additions run apart"
"""How the note of a row begins whose kernels of norm layers do less than they might."""
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9.5, "axes.labelsize": 9, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "legend.fontsize": 9, "legend.frameon": False, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.8, "axes.titlelocation": "left", "hatch.linewidth": 0.9,
}  # fmt: skip
"""No text is under 8 points where a page shows a picture 6.7 inches wide."""
WIDTH, DPI = 7.2, 200


def by_batch(content: Row) -> list[Row]:
    """Rows of the curves over the batch size."""
    return [row for row in content["rows"] if row.get("curve") == "batch" and row["status"] == "ok"]


def by_method(content: Row) -> list[Row]:
    """Rows of methods at several shares selected, of the network and batch that the first one has."""
    rows = [row for row in content["rows"] if row.get("curve") is None and row["status"] == "ok"]
    return [row for row in rows if all(row[key] == rows[0][key] for key in ("net", "batch", "mode"))]


def rows_hash(content: Row) -> str:
    """Sixteen hex digits that tell the rows of one run from those of another of the same tree."""
    return hashlib.sha256(json.dumps(content["rows"], sort_keys=True).encode()).hexdigest()[:16]


def draw(content: Row, folder: Path) -> list[Path]:
    """The pictures that the file has rows for, written into a folder."""
    from matplotlib import rc_context

    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows, picture in ((CURVES, by_batch(content), _curves), (METHODS, by_method(content), _methods)):
        if rows:
            with rc_context(STYLE):
                about = {"Description": content["tree"], "Comment": rows_hash(content), "Software": None}
                picture(rows).savefig(folder / name, dpi=DPI, facecolor="white", metadata=about)
            written.append(folder / name)
    return written


def _curves(rows: Sequence[Row]) -> Any:
    """Images per second, milliseconds of a call, and memory over the batch size, a line for each network."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = Figure(figsize=(WIDTH, 3.3), layout="constrained")
    nets = sorted({row["net"] for row in rows}, key=_natural)
    styles = {net: LINES[at % len(LINES)] for at, net in enumerate(nets)}
    sizes = sorted({row["batch"] for row in rows})
    shown: Any = figure.subplots(1, len(PANELS))
    for axes, (key, title) in zip(shown, PANELS, strict=True):
        for net, (colour, marker) in styles.items():
            found = sorted((row for row in rows if row["net"] == net and row[key]), key=lambda row: row["batch"])
            axes.plot([row["batch"] for row in found], [row[key] for row in found], color=colour, linewidth=1.4)
            for row in found:
                inside = "white" if _apart(row) else colour
                axes.plot(row["batch"], row[key], marker, color=colour, markerfacecolor=inside, markersize=5.5)
        axes.set(xscale="log", yscale="log", xlabel="batch size, images")
        axes.set_title(title)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y", color=RULE, linewidth=0.6)
        axes.set_axisbelow(True)
    keys = [
        Line2D([], [], color=colour, marker=marker, markersize=5.5, label=net)
        for net, (colour, marker) in styles.items()
    ]
    if any(map(_apart, rows)):
        empty: dict[str, Any] = {"markerfacecolor": "white", "linestyle": "none", "markersize": 5.5}
        keys.append(Line2D([], [], color=INK, marker="o", label="open: ReLU and additions run apart", **empty))
    figure.legend(handles=keys, loc="outside upper left", ncols=3, columnspacing=1.6, handlelength=2.2)
    return figure


def _methods(rows: Sequence[Row]) -> Any:
    """Images per second as bars, a group for each method, a bar for each share selected."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    methods = list(dict.fromkeys(row["method"] for row in rows))
    shares = sorted({row["select"] for row in rows}, reverse=True)
    colours = {share: SHARES[at % len(SHARES)] for at, share in enumerate(shares)}
    thick = 0.84 / len(shares)
    figure = Figure(figsize=(WIDTH, 1.0 + 0.155 * len(methods) * (len(shares) + 0.6)), layout="constrained")
    axes: Any = figure.add_subplot()
    most = max(row["images_per_s"] for row in rows)
    for row in rows:
        place = methods.index(row["method"]) + (shares.index(row["select"]) - (len(shares) - 1) / 2) * thick
        axes.barh(place, row["images_per_s"], thick * 0.9, color=colours[row["select"]], linewidth=0.6,
                  edgecolor=INK, hatch=_hatch(row))  # fmt: skip
        axes.text(row["images_per_s"] + 0.008 * most, place, f"{row['images_per_s']:,.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(methods)), [NAMES.get(method, method) for method in methods])
    axes.set(xlim=(0, 1.09 * most), ylim=(len(methods) - 0.5, -0.5), xlabel=f"images/s, batches of {rows[0]['batch']}")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="y", length=0)
    keys = [
        Patch(facecolor=colour, edgecolor=INK, linewidth=0.6, label=f"{share} % selected")
        for share, colour in colours.items()
    ]
    if any(map(_hatch, rows)):
        keys.append(Patch(facecolor="white", edgecolor=INK, linewidth=0.6, hatch=EAGER, label="ran eagerly"))
    figure.legend(handles=keys, loc="outside upper left", ncols=4, columnspacing=1.6)
    return figure


def _natural(name: str) -> list[tuple[int, str]]:
    """Names sort by their numbers: resnet18 before resnet152."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _apart(row: Row) -> bool:
    return any(note.startswith(APART) for note in row["notes"])


def _hatch(row: Row) -> str:
    return "" if row.get("as_asked", True) else EAGER


def main(arguments: list[str] | None = None) -> int:
    """Draw what a file of this tree has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "results" / "speed" / "curves.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the pictures")
    asked = parser.parse_args(arguments)
    content = json.loads(asked.file.read_text())
    if content.get("tree") != tree_hash():
        print(f"expected a file of this tree, {asked.file.name} is of another; measure again", file=sys.stderr)
        return 1
    for path in draw(content, asked.out):
        print(f"drew {path}: {content['host']['device']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
