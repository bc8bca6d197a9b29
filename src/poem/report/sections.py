"""A page as a value: its honest header, and a section for each suite. Markdown and HTML are written from it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poem.bench.analysis.aggregate import Grid
from poem.bench.result import CellResult
from poem.report import costs, demo, protocol, tables, words
from poem.report.figures import figures
from poem.report.probed import Figure
from poem.report.tables import Numbers, Plain

if TYPE_CHECKING:
    from poem.bench.store import Failure
    from poem.bench.suites import Suite

SMOKE = (
    "Smoke, not evidence: tiny nets on digits show that every path runs. Nothing here speaks for or against a method."
)
NOTHING_DRAWN = " None of them met a sample of the kind that this figure is about, so there is nothing to draw."
SCALES = {
    "tiny": "tiny (digits, small nets)",
    "cifar10": "cifar10 (CIFAR-10, small nets)",
    "full": "full (the paper's data and nets)",
}


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A claim of the paper, in our words, and what these results say to it."""

    text: str
    state: str
    """holds, does not hold or cannot say."""
    why: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """One suite."""

    name: str
    title: str
    drawn: bool
    """Whether it is a figure, whose numbers are folded away."""
    readout: str
    said: tuple[str, ...]
    """What the numbers show, in sentences; the demo's alone has any."""
    warnings: tuple[str, ...]
    """Why its numbers should not be believed as they stand."""
    coverage: str
    """How many of its cells are there, and how flags changed it."""
    brief: str
    """The same in three words."""
    complete: bool
    score: str
    """How many of its claims hold; empty without claims."""
    stream: str
    """Data, images, seeds and batch size in one line."""
    remark: str
    """How the paper's numbers stand to ours; empty without any."""
    numbers: Numbers | None
    efficiency: Plain | None
    figures: tuple[Figure, ...]
    claims: tuple[Judged, ...]
    smoke: bool
    """Whether its data are too small to be evidence for or against them."""
    notes: tuple[str, ...]
    cards: tuple[Plain, ...]
    ledger: Plain
    failures: tuple[tuple[str, str], ...]
    """Label and last line of each cell that raised."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Everything that a report says."""

    title: str
    smoke: bool
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]

    @property
    def has_paper(self) -> bool:
        """Whether some section shows the paper's numbers beside ours."""
        return any(section.remark for section in self.sections)


def page(suites: Sequence[Suite], reports: Iterable[CellResult], failures: Mapping[str, Failure]) -> Page:
    """The page of these suites, with whatever is there of them."""
    found = list(reports)
    grids = [Grid(suite, found) for suite in suites]
    used = list({key: report for grid in grids for key, report in grid.results.items()}.values())
    planned = len({placed.cell.key for suite in suites for placed in suite.placed})
    return Page(
        title="Test-time adaptation, measured",
        smoke=any(suite.smoke for suite in suites),
        facts=tuple(_facts(suites, used, planned)),
        sections=tuple(section(grid, failures) for grid in grids),
    )


def section(grid: Grid, failures: Mapping[str, Failure]) -> Section:
    """One suite's section."""
    suite = grid.suite
    numbers = tables.numbers(grid) if suite.kind in ("table", "lines", "bars") else None
    drawn, claims = figures(grid), verdicts(grid)
    failed = {placed.cell.key: failures[placed.cell.key] for placed in suite.placed if placed.cell.key in failures}
    return Section(
        name=suite.name,
        title=suite.title,
        drawn=suite.kind not in ("table", "efficiency"),
        readout=suite.readout,
        said=tuple(demo.sentences(suite, demo.table(suite, grid.results.values()))) if suite.name == demo.NAME else (),
        warnings=(*protocol.edited(grid), *protocol.not_finite(grid), *protocol.mixed(grid)),
        coverage=_coverage(grid, len(failed)) + ("" if drawn or numbers or not grid.present else NOTHING_DRAWN),
        brief=_brief(grid),
        complete=grid.present == grid.planned,
        score=_score(claims),
        stream=_stream(grid),
        remark=_remark(grid, numbers),
        numbers=numbers,
        efficiency=costs.efficiency(grid) if suite.kind == "efficiency" else None,
        figures=drawn,
        claims=claims,
        smoke=suite.smoke,
        notes=(*suite.notes, *_on_settings(grid, drawn), *_said_by_cells(list(grid.results.values()))),
        cards=protocol.cards(grid),
        ledger=costs.ledger(grid),
        failures=tuple((failure.cell.label, failure.reason) for failure in failed.values()),
    )


def verdicts(grid: Grid) -> tuple[Judged, ...]:
    """Each claim of a suite with what its check found."""
    from poem.bench.analysis.claims import check_claims

    states = {True: "holds", False: "does not hold", None: "cannot say"}
    found = check_claims(grid.suite, grid.results.values())
    return tuple(Judged(text=claim.text, state=states[said.holds], why=said.words) for claim, said in found)


def _score(claims: Sequence[Judged]) -> str:
    """How many claims hold, do not, and are open."""
    found = Counter(claim.state for claim in claims)
    holds, fails, unsaid = (found[state] for state in ("holds", "does not hold", "cannot say"))
    parts = [
        f"{holds} {'holds' if holds == 1 else 'hold'}",
        f"{fails} {'does' if fails == 1 else 'do'} not hold",
        f"{unsaid} open",
    ]
    said = [part for part, number in zip(parts, (holds, fails, unsaid), strict=True) if number]
    return f"Claims: {', '.join(said)}." if said else ""


def _brief(grid: Grid) -> str:
    there = "" if grid.present == grid.planned else f"{words.count(grid.present)} of "
    return f"{there}{words.plural(grid.planned, 'cell')}."


def _coverage(grid: Grid, failed: int) -> str:
    if grid.present == 0:
        text = f"No cell of this suite is there yet; it asks for {words.count(grid.planned)}."
    elif grid.present == grid.planned:
        text = f"All {words.plural(grid.planned, 'cell')} are there." if grid.planned > 1 else "Its one cell is there."
    else:
        gap = f"a number that rests on a missing one is shown as {words.NOTHING}"
        text = f"{words.count(grid.present)} of {words.plural(grid.planned, 'cell')} are there; {gap}."
    text += f" {words.plural(failed, 'cell')} failed." if failed else ""
    return text + _altered(grid.suite.altered)


def _altered(by: Sequence[str]) -> str:
    """What flags did to a suite, and what it is then not to be compared with."""
    limits = [each for each in by if each.startswith("limit ")]
    others = [each for each in by if each not in limits]
    text = "".join(f" Shortened by --{each}: not comparable with runs of another length." for each in limits)
    stated = f" Changed by flags, {'; '.join(others)}: not comparable with the suite as its file states it."
    return text + (stated if others else "")


def _on_settings(grid: Grid, drawn: Sequence[Figure]) -> list[str]:
    """How rates were chosen, and what times are worth, where a section has either."""
    timed = grid.suite.kind == "efficiency" or any(figure.title == "Time" for figure in drawn)
    said = [protocol.CHOSEN] if protocol.is_chosen(grid) else []
    return said + ([costs.side_by_side(list(grid.results.values()))] if timed and grid.results else [])


def _said_by_cells(reports: Sequence[CellResult]) -> list[str]:
    """What cells had to say of themselves, such as a fallback, each once."""
    found = Counter(note for report in reports for note in report.notes)
    return [f"{note} ({words.plural(times, 'cell')})" for note, times in found.items()]


def _stream(grid: Grid) -> str:
    """What was measured, as short as it can be said."""
    reports = list(grid.results.values())
    if not reports:
        return ""
    cards = [report.card for report in reports]
    data = _each(card.get("data") for card in cards)
    images = _each(words.count(card["n"]) for card in cards if isinstance(card.get("n"), int))
    seeds = sorted({report.cell.seed for report in reports})
    batch = _each(report.cell.batch_size for report in reports)
    scenario = _each(report.cell.scenario for report in reports)
    stands = _stands(grid)
    bases = _each(f"{base}{stands.get(base, '')}" for base in (report.cell.base for report in reports))
    return f"{data} with {bases}, {images} images of each shift, {scenario}, batch size {batch}, {_seeds(seeds)}"


def _stands(grid: Grid) -> dict[str, str]:
    """For which of the paper's networks each base stands, where rows or columns are called after those."""
    found: dict[str, dict[str, None]] = {}
    for placed in grid.suite.placed:
        for word in (placed.row, placed.column):
            if word in tables.NETWORKS:
                found.setdefault(placed.cell.base, {})[word] = None
    return {base: f" (for {' and '.join(called)})" for base, called in found.items()}


def _seeds(seeds: Sequence[int]) -> str:
    said = ", ".join(str(seed) for seed in seeds)
    return f"seed {said}: no deviation" if len(seeds) == 1 else f"seeds {said}: mean ± deviation"


def _remark(grid: Grid, numbers: Numbers | None) -> str:
    paper = numbers.has_paper if numbers is not None else grid.suite.kind == "efficiency" and bool(grid.suite.numbers)
    if not paper:
        return ""
    if tables.comparable(grid):
        return "Small, below ours: the paper's number, and ours less the paper's."
    return f"Small, below ours: the paper's number, marked \u2020 for {tables.OTHER_DATA}; so no difference is shown."


def _facts(suites: Sequence[Suite], reports: Sequence[CellResult], planned: int) -> list[tuple[str, str]]:
    seeds = sorted({report.cell.seed for report in reports})
    provenance = [report.provenance for report in reports]
    commits = dict.fromkeys(_commit(each) for each in provenance)
    devices = dict.fromkeys(_device(report.host) for report in reports)
    versions = dict.fromkeys(
        ", ".join(f"{name} {each[name]}" for name in ("poem", "torch", "python") if name in each) for each in provenance
    )
    made = dict.fromkeys(_less_seed(str(report.card.get("provenance", "not stated"))) for report in reports)
    started = sorted(str(report.host["started"]) for report in reports if "started" in report.host)
    facts = [
        ("scale", words.listed([SCALES.get(each, each) for each in dict.fromkeys(suite.scale for suite in suites)])),
        ("cells", f"{words.count(len(reports))} of {words.count(planned)}"),
        ("images", _images(reports)),
        ("seeds", ", ".join(map(str, seeds)) + (" (one seed: no deviation)" if len(seeds) == 1 else "")),
        ("data", words.listed(list(made))),
        ("commit", words.listed(list(commits))),
        ("versions", words.listed(list(versions))),
        ("device", words.listed(list(devices))),
        ("checksums", _checksums(reports)),
        ("measured", " to ".join(dict.fromkeys(each[:16].replace("T", " ") for each in (started[:1] + started[-1:])))),
    ]
    return [(name, text) for name, text in facts if text]


def _checksums(reports: Sequence[CellResult]) -> str:
    """How many results are as they were written; nothing to say of results that come from no file."""
    found = Counter(report.intact for report in reports)
    if not found[True] and not found[False]:
        return ""
    parts = [f"{words.count(found[True])} match"]
    parts += [f"{words.count(found[False])} do{'es' if found[False] == 1 else ''} not"] if found[False] else []
    parts += [f"{words.count(found[None])} ha{'s' if found[None] == 1 else 've'} none"] if found[None] else []
    return ", ".join(parts)


def _images(reports: Sequence[CellResult]) -> str:
    sizes = sorted({int(report.card["n"]) for report in reports if isinstance(report.card.get("n"), int)})
    if not sizes:
        return ""
    each = words.count(sizes[0]) if len(sizes) == 1 else f"{words.count(sizes[0])} to {words.count(sizes[-1])}"
    answered = sum(_answered(report) for report in reports)
    return f"{each} of each shift; {words.count(answered)} answered in all"


def _answered(report: CellResult) -> float:
    """Images that got an answer, those of missed batches too, which no ledger counts."""
    return sum(domain.get("n", 0) for domain in report.domains.values()) or report.ledger.get("images", 0)


def _less_seed(provenance: str) -> str:
    """Where data came from, whatever the seed; seeds have a line of their own."""
    return re.sub(r"\bseed \d+, ", "", provenance)


def _device(host: Mapping[str, Any]) -> str:
    device = str(host.get("device", "not stated"))
    return f"{device} ({host['cpu']}, {host.get('cores', '?')} cores)" if device == "cpu" and "cpu" in host else device


def _commit(provenance: Mapping[str, Any]) -> str:
    commit = str(provenance.get("commit") or "not known")[:12]
    return f"{commit}, with changes that are not committed" if provenance.get("dirty") else commit


def _each(values: Iterable[Any]) -> str:
    return words.listed([str(value) for value in dict.fromkeys(values) if value is not None])
