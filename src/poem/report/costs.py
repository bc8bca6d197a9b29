"""Cost of methods: the paper's efficiency table, and the ledger summed over cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from poem.bench.analysis.aggregate import Grid, timing
from poem.bench.result import CellResult
from poem.report import formatting
from poem.report.formatting import MISSING, TIMES
from poem.report.tables import (
    TextTable,
    block_title,
    comparable_with_paper,
    group_table,
    learns,
    source_access,
)

PAPER_IMAGES = 50_000
"""Images in the stream of the paper's efficiency table."""
OTHER_COMPUTATIONS = {
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
"""Text in a recipe, and what that part computes beside the method's forward and backward passes."""


def efficiency(grid: Grid) -> TextTable:
    """The paper's efficiency table: for each method source data, online, passes, other computations, time and speed."""
    many = len(grid.groups) > 1
    rows, published = [], []
    for group in grid.groups:
        for row in grid.rows(group):
            rows.append((f"{block_title(grid, group)} · {row}" if many else row, *_costs(grid, group, row)))
            published.append(_paper_costs(grid, group, row))
    header = ("Method", "Source data?", "Online?", "#Forward", "#Backward", "Other computations", "Time (s)", "FPS")
    caption = "Images that each method needs in a run, and its time in the adapter: means over runs"
    return TextTable(
        caption=caption, header=header, rows=tuple(rows), paper=tuple(published) if any(map(any, published)) else ()
    )


def _paper_costs(grid: Grid, group: str, row: str) -> tuple[str, ...]:
    names = ("#Forward", "#Backward", "GPU Time (s)", "FPS")
    forward, backward, time, fps = (grid.suite.paper(group, row, name) for name in names)
    mark = "" if comparable_with_paper(grid) else "†"
    texts = (
        "" if forward is None else passes(int(forward), PAPER_IMAGES) + mark,
        "" if not backward else passes(int(backward), PAPER_IMAGES) + mark,
        "",
        "" if time is None else formatting.seconds(time) + mark,
        "" if fps is None else formatting.speed(fps) + mark,
    )
    return ("", "", "", *texts)


def _costs(grid: Grid, group: str, row: str) -> tuple[str, ...]:
    results = grid.at(group, row)
    if not results:
        return (MISSING,) * 7
    spent = {key: round(total / len(results)) for key, total in sum_ledgers(results).items()}
    recipe = results[0].recipe
    online = learns(results[0]) and "EachImage" not in recipe.get("recover", "")
    time = _mean(grid, group, row, "adapt_s")
    fps = _mean(grid, group, row, "images_per_s")
    return (
        "✓" if spent.get("source_images") else TIMES,
        "✓" if online else TIMES,
        passes(spent.get("forwards", 0), spent.get("images", 0)),
        passes(spent.get("backwards", 0), spent.get("images", 0)),
        other_computations(recipe),
        MISSING if time is None else formatting.seconds(time),
        MISSING if fps is None else formatting.speed(fps),
    )


def _mean(grid: Grid, group: str, row: str, key: str) -> float | None:
    found = [value for result in grid.at(group, row) if (value := timing(key)(result)) is not None]
    return sum(found) / len(found) if found else None


def passes(needed: int, images: int) -> str:
    """Images needed, relative to those of the stream: `500`, `500 x 65`, `500 + 186`, `190`, or a dash for none."""
    if needed == 0:
        return MISSING
    if images and needed > images:
        whole, rest = divmod(needed, images)
        return (
            f"{formatting.count(images)} {TIMES} {whole}"
            if rest == 0
            else f"{formatting.count(images)} + {formatting.count(needed - images)}"
        )
    return formatting.count(needed)


def other_computations(recipe: dict[str, str]) -> str:
    """What a recipe's parts compute beside forward and backward passes."""
    text = " ".join(recipe.values())
    return ", ".join(cost for part, cost in OTHER_COMPUTATIONS.items() if part in text) or "none"


LEDGER_CAPTION = (
    "Ledger: counts in images, over all cells of a row. Needed: what the method's arithmetic asks for, as the paper "
    "counts; computed: what went through the network, where a batch stays whole though few of it are selected"
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


def sum_ledgers(results: Sequence[CellResult]) -> Counter[str]:
    """The sum of the ledgers of several cells."""
    total = Counter[str]()
    for result in results:
        total.update({key: int(value) for key, value in result.ledger.items()})
    return total


def ledger(grid: Grid) -> TextTable:
    """The summed ledger of each row, with time, and with peak memory where a GPU was used."""
    rows = []
    counted = any(_peak(result) for result in grid.results.values())
    for group in grid.groups:
        for row in grid.rows(group):
            results = grid.at(group, row)
            if not results:
                continue
            spent = sum_ledgers(results)
            peak = max(map(_peak, results))
            cells = (
                block_title(grid, group), row, source_access(results), formatting.count(len(results)),
                *(formatting.count(spent[key]) for key in LEDGER),
                formatting.seconds(sum(result.timing.get("adapt_s", 0.0) for result in results)),
                formatting.seconds(sum(result.timing.get("data_s", 0.0) for result in results)),
                *([formatting.mebibytes(peak) if peak else MISSING] if counted else []),
            )  # fmt: skip
            rows.append(cells)
    header = ("group", "row", "source access", "cells", *LEDGER.values(), "adapting (s)", "loading (s)")
    header += ("peak memory of the GPU",) if counted else ()
    return group_table(LEDGER_CAPTION, header, rows)


def _peak(result: CellResult) -> float:
    """Peak bytes of a GPU; 0 on a CPU, where the number is of the process and includes cells that ran before."""
    return 0.0 if result.host.get("device", "cpu") == "cpu" else result.timing.get("peak_bytes", 0.0)


def timing_note(results: Sequence[CellResult]) -> str:
    """A note on whether other cells ran on the machine at the same time, which makes times longer."""
    counts = {result.host.get("processes") for result in results}
    if counts == {1}:
        return "Times are from cells run one after the other."
    stated = sorted(count for count in counts if isinstance(count, int) and count > 1)
    where = f", here in up to {stated[-1]} processes" if stated else ""
    return f"Times are from cells run side by side{where}; run with --workers 1 for times of a machine to itself."
