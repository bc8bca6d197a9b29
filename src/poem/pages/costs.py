"""What methods cost: the paper's efficiency table, and the ledger over all cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from poem.pages import words
from poem.pages.aggregate import Grid, timing
from poem.pages.tables import Plain, comparable, grouped, source_access
from poem.pages.words import NOTHING, TIMES
from poem.report import Report

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
    """Source data, online, images needed forward and backward, other computations, time and speed."""
    many = len(grid.groups) > 1
    rows, theirs = [], []
    for group in grid.groups:
        for row in grid.rows(group):
            rows.append((f"{group} · {row}" if many else row, *_costs(grid, group, row)))
            theirs.append(_their_costs(grid, group, row))
    head = ("Method", "Source data?", "Online?", "#Forward", "#Backward", "Other computations", "Time (s)", "FPS")
    caption = "Images that each method needs, and time in the adapter"
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
    spent = ledger_of(reports)
    recipe = reports[0].recipe
    moves = not recipe.get("parameters", "").startswith("Nothing")
    online = moves and "EachImage" not in recipe.get("recover", "")
    time = _mean(grid, group, row, "adapt_s")
    fps = _mean(grid, group, row, "images_per_s")
    return (
        "✓" if spent["source_images"] else TIMES,
        "✓" if online else TIMES,
        passes(spent["forwards"], spent["images"]),
        passes(spent["backwards"], spent["images"]),
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


def ledger_of(reports: Sequence[Report]) -> Counter[str]:
    """The ledgers of several cells, summed."""
    total = Counter[str]()
    for report in reports:
        total.update({key: int(value) for key, value in report.ledger.items()})
    return total


def ledger(grid: Grid) -> Plain:
    """Counts in images over all cells of a row, with time and memory."""
    rows = []
    for group in grid.groups:
        for row in grid.rows(group):
            reports = grid.at(group, row)
            if not reports:
                continue
            spent = ledger_of(reports)
            peak = max((report.timing.get("peak_bytes", 0.0) for report in reports), default=0.0)
            cells = (
                group, row, source_access(reports), words.count(len(reports)),
                *(words.count(spent[key]) for key in LEDGER),
                words.seconds(sum(report.timing.get("adapt_s", 0.0) for report in reports)),
                words.seconds(sum(report.timing.get("data_s", 0.0) for report in reports)),
                words.size(peak) if peak else NOTHING,
            )  # fmt: skip
            rows.append(cells)
    head = ("group", "row", "source access", "cells", *LEDGER.values(), "adapting (s)", "loading (s)", "peak memory")
    return grouped(Plain(caption="Ledger: counts in images, over all cells of a row", head=head, rows=tuple(rows)))
