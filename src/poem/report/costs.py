"""What methods cost: the paper's efficiency table, and the ledger over all cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from poem.bench.analysis.aggregate import Grid, timing
from poem.bench.result import CellResult
from poem.report import words
from poem.report.tables import Plain, comparable, grouped, learns, source_access, titled
from poem.report.words import NOTHING, TIMES

PAPER_IMAGES = 50_000
"""In the stream of the paper's efficiency table."""
OTHER = {
    "FisherAnchor": "Fisher regulariser",
    "SAM(": "second pass at perturbed weights",
    "PLPD": "PLPD pass",
    "AugMix": "AugMix views",
    "Consistency": "augmented pass",
    "MeanTeacher": "teacher passes",
    "Laplacian": "neighbour graph",
    "Explore(": "selects again after an update",
    "Repeat(": "repeats its update",
    "AdaptBranch": "adapt branch",
}
"""A word of a recipe, and what it costs beside forward and backward passes."""


def efficiency(grid: Grid) -> Plain:
    """Source data, online, images needed forward and backward, other computations, time and speed: of one run."""
    many = len(grid.groups) > 1
    rows, theirs = [], []
    for group in grid.groups:
        for row in grid.rows(group):
            rows.append((f"{titled(grid, group)} · {row}" if many else row, *_costs(grid, group, row)))
            theirs.append(_their_costs(grid, group, row))
    head = ("Method", "Source data?", "Online?", "#Forward", "#Backward", "Other computations", "Time (s)", "FPS")
    caption = "Images that each method needs in a run, and its time in the adapter: means over runs"
    return Plain(caption=caption, head=head, rows=tuple(rows), paper=tuple(theirs) if any(map(any, theirs)) else ())


def _their_costs(grid: Grid, group: str, row: str) -> tuple[str, ...]:
    names = ("#Forward", "#Backward", "GPU Time (s)", "FPS")
    forward, backward, time, fps = (grid.suite.paper(group, row, name) for name in names)
    mark = "" if comparable(grid) else "†"
    texts = (
        "" if forward is None else passes(int(forward), PAPER_IMAGES) + mark,
        "" if not backward else passes(int(backward), PAPER_IMAGES) + mark,
        "",
        "" if time is None else words.seconds(time) + mark,
        "" if fps is None else words.speed(fps) + mark,
    )
    return ("", "", "", *texts)


def _costs(grid: Grid, group: str, row: str) -> tuple[str, ...]:
    reports = grid.at(group, row)
    if not reports:
        return (NOTHING,) * 7
    spent = {key: round(total / len(reports)) for key, total in ledger_of(reports).items()}
    recipe = reports[0].recipe
    online = learns(reports[0]) and "EachImage" not in recipe.get("recover", "")
    time = _mean(grid, group, row, "adapt_s")
    fps = _mean(grid, group, row, "images_per_s")
    return (
        "✓" if spent.get("source_images") else TIMES,
        "✓" if online else TIMES,
        passes(spent.get("forwards", 0), spent.get("images", 0)),
        passes(spent.get("backwards", 0), spent.get("images", 0)),
        other_computations(recipe),
        NOTHING if time is None else words.seconds(time),
        NOTHING if fps is None else words.speed(fps),
    )


def _mean(grid: Grid, group: str, row: str, key: str) -> float | None:
    found = [value for report in grid.at(group, row) if (value := timing(key)(report)) is not None]
    return sum(found) / len(found) if found else None


def passes(needed: int, images: int) -> str:
    """Images needed, against the stream's: `500`, `500 x 65`, `500 + 186`, `190`, or nothing."""
    if needed == 0:
        return NOTHING
    if images and needed > images:
        whole, rest = divmod(needed, images)
        return (
            f"{words.count(images)} {TIMES} {whole}"
            if rest == 0
            else f"{words.count(images)} + {words.count(needed - images)}"
        )
    return words.count(needed)


def other_computations(recipe: dict[str, str]) -> str:
    """What a recipe's words cost beside plain passes."""
    text = " ".join(recipe.values())
    return ", ".join(cost for word, cost in OTHER.items() if word in text) or "none"


LEDGER_CAPTION = (
    "Ledger: counts in images, over all cells of a row. Needed: what the method's arithmetic asks for, as the paper "
    "counts; computed: what went through the network, where a batch stays whole though few of it teach"
)
LEDGER = {
    "images": "images",
    "forwards": "forward, needed",
    "forwards_computed": "forward, computed",
    "backwards": "backward, needed",
    "backwards_computed": "backward, computed",
    "updates": "updates",
    "selected": "selected",
    "newly_reliable": "newly reliable",
    "no_longer_reliable": "no longer reliable",
    "resets": "resets",
    "skips": "batches skipped",
    "source_images": "source images",
}


def ledger_of(reports: Sequence[CellResult]) -> Counter[str]:
    """The ledgers of several cells, summed."""
    total = Counter[str]()
    for report in reports:
        total.update({key: int(value) for key, value in report.ledger.items()})
    return total


def ledger(grid: Grid) -> Plain:
    """Counts in images over all cells of a row, with time, and memory where a GPU counted it."""
    rows = []
    counted = any(_peak(report) for report in grid.results.values())
    for group in grid.groups:
        for row in grid.rows(group):
            reports = grid.at(group, row)
            if not reports:
                continue
            spent = ledger_of(reports)
            peak = max(map(_peak, reports))
            cells = (
                titled(grid, group), row, source_access(reports), words.count(len(reports)),
                *(words.count(spent[key]) for key in LEDGER),
                words.seconds(sum(report.timing.get("adapt_s", 0.0) for report in reports)),
                words.seconds(sum(report.timing.get("data_s", 0.0) for report in reports)),
                *([words.size(peak) if peak else NOTHING] if counted else []),
            )  # fmt: skip
            rows.append(cells)
    head = ("group", "row", "source access", "cells", *LEDGER.values(), "adapting (s)", "loading (s)")
    head += ("peak memory of the GPU",) if counted else ()
    return grouped(Plain(caption=LEDGER_CAPTION, head=head, rows=tuple(rows)))


def _peak(report: CellResult) -> float:
    """Bytes of a GPU at the most. On a CPU the number is the process's, whatever ran in it before: 0 here."""
    return 0.0 if report.host.get("device", "cpu") == "cpu" else report.timing.get("peak_bytes", 0.0)


def side_by_side(reports: Sequence[CellResult]) -> str:
    """What times are worth: whether other cells ran on the machine meanwhile."""
    counts = {report.host.get("processes") for report in reports}
    if counts == {1}:
        return "Times are from cells run one after the other."
    known = sorted(count for count in counts if isinstance(count, int) and count > 1)
    where = f", here in up to {known[-1]} processes" if known else ""
    return f"Times are from cells run side by side{where}; run with --workers 1 for times of a machine to itself."
