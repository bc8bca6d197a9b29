"""Stand-ins for `poem.bench.benchmark.measure`: they end at once, wait, or take their process down."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from poem.bench.benchmark import Place
from poem.bench.cell import Cell
from poem.bench.result import Report
from poem.recipes.text import written

PATH = "stand_ins:measure"
Watch = Callable[[int, int], None]


def cell(method: str = "source", seed: int = 0, **fields: object) -> Cell:
    """A cell of the smallest kind."""
    values = {"base": "digits-ln", "data": "digits-test", "corruptions": ["fog"], "n": 64, "preset": "cifar"}
    return Cell.from_dict({**values, "method": method, "seed": seed, **fields})


def recipe_of(of: Cell) -> dict[str, str]:
    """The cell's recipe as text; of a method that only stands in, none."""
    try:
        return written(of.recipe())
    except ValueError:
        return {}


def report(of: Cell, top1: float = 50.0) -> Report:
    """A result as small as the schema allows."""
    return Report(
        cell=of, recipe=recipe_of(of), base={"name": of.base}, card={"data": of.data, "n": 64, "total": 64},
        metrics={"top1": top1}, domains={}, windows=[top1], groups={}, ledger={"images": 64}, timing={"total_s": 0.5},
    )  # fmt: skip


def measure(cell: Cell, place: Place, *, watch: Watch | None = None) -> Report:
    """Answers at once, unless the cell's method asks for trouble; the place's root is scratch."""
    if watch is not None:
        watch(32, 64)
    scratch = Path(place.root or ".")
    if cell.method == "kills-once" and not (scratch / "killed").exists():
        (scratch / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if cell.method == "kills-always":
        os.kill(os.getpid(), signal.SIGKILL)
    if cell.method == "waits":
        (scratch / f"waiting-{os.getpid()}").touch()
        time.sleep(60)
    if cell.method == "raises":
        raise RuntimeError("no such luck")
    return report(cell, top1=float(cell.seed))
