"""Progress on standard error: a bar on a terminal, a line now and then elsewhere, and the time left."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from rich.errors import LiveError

from poem._util.progress import Progress, duration, track


def test_elsewhere_it_prints_the_first_step_then_now_and_then_and_never_the_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr("time.monotonic", lambda: clock)
    with Progress("tent", 8, unit="images") as shown:
        for _ in range(8):
            clock += 4
            shown.advance()
    assert capsys.readouterr().err.splitlines() == [
        "tent: 1/8 images, about 28 s left",
        "tent: 4/8 images, about 16 s left",
        "tent: 7/8 images, about 4 s left",
    ]


def test_it_prints_before_the_first_step_where_that_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr("time.monotonic", lambda: clock)
    with Progress("digits-bn", unit="epochs") as shown:
        shown.update(0, 20)
        clock += 30
        shown.update(0)
        shown.update(1, note="loss 0.512")
    assert capsys.readouterr().err.splitlines() == [
        "digits-bn: 0/20 epochs",
        "digits-bn: 1/20 epochs, loss 0.512, about 10 min left",
    ]


def test_items_are_counted_by_size_and_those_of_an_earlier_run_cost_no_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr("time.monotonic", lambda: clock)

    def batches() -> list[list[int]]:
        return [[0] * 4, [0] * 4]

    for batch in track(batches(), "tent", 16, unit="images", size=len, done=8):
        assert len(batch) == 4
        clock += 5
    assert capsys.readouterr().err == "tent: 12/16 images, about 5 s left\n"


def test_on_a_terminal_it_is_a_bar_that_is_erased_at_the_end() -> None:
    pty = pytest.importorskip("pty")
    code = """
from poem._util.progress import Progress
with Progress("tent", 4, unit="images") as shown:
    for _ in range(3):
        shown.advance()
"""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, env=environment, timeout=60, check=True)
    os.close(theirs)
    text = os.read(ours, 65536).decode()
    os.close(ours)
    assert re.search(r"tent: 3/4 images, about \d+ s left", text)
    assert text.rstrip().endswith("\x1b[2K"), "the line is erased"


def test_inside_a_display_that_allows_no_other_it_prints_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise LiveError("Only one live display may be active at once")

    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setattr("rich.progress.Progress.start", refuse)
    with Progress("tent", 4, unit="images") as shown:
        shown.advance()
    assert re.fullmatch(r"tent: 1/4 images, about \d+ s left\n", capsys.readouterr().err)


def test_durations() -> None:
    assert [duration(seconds) for seconds in (5, 600, 9000, 999_999)] == ["5 s", "10 min", "2.5 h", "12 days"]
