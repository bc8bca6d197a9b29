"""The picture at the top of the README: digits in fog, what two small networks answered before and after adapting.

    python benchmarks/first_screen.py              # runs, writes results/first_screen.json and docs/first_screen.png
    python benchmarks/first_screen.py --draw       # draws again from the JSON file

Data and networks come with the package. Answers are those of `poem.bench.measure`, on one CPU thread.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from poem.bench.cell import Cell
from poem.report.pictures import corrected, image_pairs, run_again

ROOT = Path(__file__).parent.parent
RESULT, PICTURE = ROOT / "results" / "first_screen.json", ROOT / "docs" / "first_screen.png"
NETWORKS = {"digits-bn": "batch norm", "digits-gn": "group norm"}
METHODS = {"source": "as it is", "tent": "Tent", "auto": "auto, guarded"}
COLOURS = {"source": "#6b6862", "tent": "#2563a8", "auto": "#23815a"}
INK, MUTED, WRONG = "#1f1d1a", "#65605a", "#a5331c"
SHOWN = 4
"""Digits that the picture shows."""


def stream(base: str, method: str) -> Cell:
    """1,500 test digits in fog, in batches of 32."""
    return Cell(
        base=base, data="digits-test", method=method, corruptions=("fog",), severity=5, batch_size=32, preset="cifar",
        guard=method == "auto",
    )  # fmt: skip


def run() -> dict[str, Any]:
    """Run every method on both networks, and choose the digits of the picture.

    Those are the first, each of another class, that digits-bn got wrong as it is and right with `auto`.
    """
    rows, answers = [], {}
    for base in NETWORKS:
        for method in METHODS:
            result, answers[base, method] = run_again(stream(base, method))
            rows.append({"network": base, "method": method, "accuracy": result.metrics["top1"],
                         "seconds": round(result.timing["adapt_s"], 1)})  # fmt: skip
            print(rows[-1], flush=True)
    before, after = answers["digits-bn", "source"], answers["digits-bn", "auto"]
    examples = [
        {"image": at, "truth": before.labels[at], "before": before.answers[at], "after": after.answers[at]}
        for at in corrected(before, after, SHOWN)
    ]
    about = {"stream": "digits-test in fog, severity 5, batches of 32, seed 0", "images": len(before.labels)}
    return {**about, "preset": "cifar", "rows": rows, "examples": examples}


def draw(found: dict[str, Any]) -> None:
    """Draw images and answers on the left, bars on the right, on white that has its own frame on a dark page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.family": "DejaVu Sans", "text.color": INK}):
        figure = Figure(figsize=(10.4, 3.5), facecolor="white", dpi=150)
        _draw_examples(figure, found)
        for at, base in enumerate(NETWORKS):
            _draw_bars(figure, found, base, left=0.62 + 0.19 * at)
        figure.text(0.62, 0.9, f"right answers, % of {found['images']:,} digits in fog", fontsize=10.5, weight="bold")
        figure.savefig(PICTURE, metadata={"Software": None})
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1024:.0f} KB")


def _draw_examples(figure: Any, found: dict[str, Any]) -> None:
    examples = found["examples"]
    pixels = image_pairs(stream("digits-bn", "source"), [each["image"] for each in examples])
    figure.text(0.015, 0.9, "digits-bn, trained on clear digits", fontsize=10.5, weight="bold")
    for text, height in (("clean", 0.685), ("in fog", 0.375), ("before", 0.155), ("after", 0.055)):
        figure.text(0.015, height, text, fontsize=10, color=MUTED, va="center")
    for at, (each, pair) in enumerate(zip(examples, pixels, strict=True)):
        left = 0.09 + 0.112 * at
        for image, bottom in zip(pair, (0.55, 0.24), strict=True):
            axes = figure.add_axes((left, bottom, 0.088, 0.27))
            axes.imshow(image.permute(1, 2, 0).numpy())
            axes.set_axis_off()
        centre = left + 0.044
        figure.text(centre, 0.155, f"{each['before']}  ✗", fontsize=13, color=WRONG, ha="center", va="center")
        figure.text(
            centre, 0.055, f"{each['after']}  ✓", fontsize=13, color=COLOURS["auto"], weight="bold", ha="center",
            va="center",
        )  # fmt: skip


def _draw_bars(figure: Any, found: dict[str, Any], base: str, left: float) -> None:
    axes = figure.add_axes((left, 0.15, 0.165, 0.59))
    rows = [row for row in found["rows"] if row["network"] == base]
    for at, row in enumerate(rows):
        axes.bar(at, row["accuracy"], 0.7, color=COLOURS[row["method"]])
        axes.annotate(f"{row['accuracy']:.0f}", (at, row["accuracy"]), (0, 3), textcoords="offset points",
                      ha="center", fontsize=12, weight="bold", color=COLOURS[row["method"]])  # fmt: skip
    labels = [METHODS[row["method"]].replace(", ", ",\n") for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=8.5, color=INK)
    axes.set(ylim=(0, 60), yticks=[])
    axes.set_title(f"{base} ({NETWORKS[base]})", fontsize=9.5, color=MUTED, loc="left")
    axes.tick_params(length=0)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)


def main() -> None:
    """Run and draw, or draw alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="from the JSON file of an earlier run")
    if not parser.parse_args().draw:
        RESULT.write_text(json.dumps(run(), indent=1) + "\n")
    draw(json.loads(RESULT.read_text()))


if __name__ == "__main__":
    main()
