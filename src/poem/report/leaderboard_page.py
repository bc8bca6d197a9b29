"""The leaderboard as one HTML file, with its style and script inside."""

from __future__ import annotations

from functools import partial
from importlib import resources

from poem._util.files import without_controls
from poem.report.formatting import MISSING, signed
from poem.report.leaderboard import Leaderboard

COLUMNS = (
    ("Method", "", ""),
    ("Accuracy, %", "r", "mean over streams ± standard error"),
    ("To source, points", "r", "mean difference ± paired standard error"),
    ("Worst, points", "r", "the lowest difference of a stream to source ± paired standard error"),
    ("Worst stream", "", "the stream of that difference"),
    ("Cost, source = 1", "r", "seconds by source's, median over streams"),
    ("Cost, Tent = 1", "r", "seconds by Tent's, median over streams"),
    ("n", "r", "samples of all streams and seeds"),
    ("Seeds", "r", ""),
    ("Measured in", "", "the run, below"),
)
"""Head, class and meaning of every column."""
RUN_FACTS = ("tree", "commit", "poem", "torch", "device", "processes", "started", "file", "command")
"""Facts of a run in the order of the page; others come after them."""


def render_leaderboard(board: Leaderboard, *, title: str = "Test-time adaptation: leaderboard") -> str:
    """Render the page.

    Raises:
        ImportError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("a page needs jinja2; type: pip install 'poem-tta[bench]'") from error
    folder = resources.files("poem.report")
    names = ("leaderboard.html", "style.css", "script.js", "leaderboard.js")
    files = {name: (folder / name).read_text(encoding="utf-8") for name in names}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(signed=partial(signed, digits=2), times=times, error=error_text)
    text = environment.from_string(files["leaderboard.html"]).render(
        title=title, blocks=board.blocks, columns=COLUMNS, without_source=board.without_source,
        nets=sorted({block.net for block in board.blocks}),
        scenarios=list(dict.fromkeys(block.scenario_title for block in board.blocks)),
        runs={run: [_facts(dict(each)) for each in facts] for run, facts in board.runs.items()},
        style=files["style.css"], script=files["script.js"], own_script=files["leaderboard.js"],
    )  # fmt: skip
    return without_controls(str(text))


def times(value: float | None) -> str:
    """A ratio of costs, or a dash."""
    return MISSING if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def error_text(value: float | None) -> str:
    """An error after a number; nothing where it is not known."""
    return "" if value is None else f"± {value:.2f}"


def _facts(facts: dict[str, str]) -> list[tuple[str, str]]:
    """Facts in the order of the page, empty ones left out."""
    order = [*RUN_FACTS, *(name for name in facts if name not in RUN_FACTS)]
    return [(name, facts[name]) for name in order if facts.get(name)]
