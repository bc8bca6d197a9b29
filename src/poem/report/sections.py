"""A report as dataclasses, for the Markdown and HTML renderers: facts about the run, and a section for each suite."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poem.bench.analysis.aggregate import Grid
from poem.bench.result import CellResult
from poem.report import costs, demo, formatting, protocol, tables
from poem.report.differences import DifferenceTable, difference_tables
from poem.report.figures import figures
from poem.report.findings import bars, findings
from poem.report.pictures import Picture
from poem.report.plots import Figure
from poem.report.tables import ResultTable, TextTable

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
class CheckedClaim:
    """A claim of the paper, paraphrased, and whether it holds for these results."""

    text: str
    state: str
    """holds, does not hold or cannot say."""
    why: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """What a report says about one suite."""

    name: str
    title: str
    is_figure: bool
    """Whether the suite is a figure; its table of numbers is then collapsed."""
    readout: str
    findings: tuple[str, ...]
    """Sentences on what the numbers show, one or more for each network."""
    bars: Figure | None
    """Bars of every row for each network; None where rows are not methods."""
    warnings: tuple[str, ...]
    """Reasons not to trust the numbers: edited results, NaN answers, mixed weights."""
    coverage: str
    """How many cells have results, and how flags changed the suite."""
    cell_count: str
    """Cells with results, of all cells, for the contents."""
    complete: bool
    claims_summary: str
    """How many claims hold; empty without claims."""
    stream: str
    """Data, network, images, scenario, severity, batch size and seeds in one line."""
    paper_note: str
    """How to read the paper's numbers beside ours; empty where there are none."""
    numbers: ResultTable | None
    efficiency: TextTable | None
    differences: DifferenceTable | None
    """Paired differences to the row that was asked for; None where none was, or the suite has no such row."""
    figures: tuple[Figure, ...]
    claims: tuple[CheckedClaim, ...]
    smoke: bool
    """Whether the data are too small to be evidence."""
    notes: tuple[str, ...]
    cards: tuple[TextTable, ...]
    ledger: TextTable
    failures: tuple[tuple[str, str], ...]
    """Label and reason of each failed cell."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report."""

    title: str
    smoke: bool
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    picture: Picture | None = None
    """Images with their answers before and after adapting."""

    @property
    def has_paper(self) -> bool:
        """Whether some section shows the paper's numbers beside ours."""
        return any(section.paper_note for section in self.sections)


def build_page(
    suites: Sequence[Suite],
    results: Iterable[CellResult],
    failures: Mapping[str, Failure],
    picture: Picture | None = None,
    against: str | None = None,
) -> Page:
    """Build the page of some suites from the results that belong to them.

    `against` names a row or a method that every other row is compared with, paired.
    """
    found = list(results)
    grids = [Grid(suite, found) for suite in suites]
    used = list({key: result for grid in grids for key, result in grid.results.items()}.values())
    planned = len({placed.cell.key for suite in suites for placed in suite.placed})
    compared = [None] * len(grids) if against is None else difference_tables(grids, against)
    return Page(
        title="Test-time adaptation, measured",
        smoke=any(suite.smoke for suite in suites),
        facts=tuple(_facts(suites, used, planned)),
        sections=tuple(_build_section(grid, failures, table) for grid, table in zip(grids, compared, strict=True)),
        picture=picture,
    )


def _build_section(grid: Grid, failures: Mapping[str, Failure], differences: DifferenceTable | None) -> Section:
    suite = grid.suite
    numbers = tables.result_table(grid) if suite.kind in ("table", "lines", "bars") else None
    drawn, claims = figures(grid), checked_claims(grid)
    failed = {placed.cell.key: failures[placed.cell.key] for placed in suite.placed if placed.cell.key in failures}
    return Section(
        name=suite.name,
        title=suite.title,
        is_figure=suite.kind not in ("table", "efficiency"),
        readout=suite.readout,
        findings=_demo_findings(grid) if suite.name == demo.SUITE else findings(grid),
        bars=bars(grid),
        warnings=tuple(protocol.warnings(grid)),
        coverage=_coverage(grid, len(failed)) + ("" if drawn or numbers or not grid.present else NOTHING_DRAWN),
        cell_count=_cell_count(grid),
        complete=grid.present == grid.planned,
        claims_summary=_claims_summary(claims),
        stream=_stream(grid),
        paper_note=_paper_note(grid, numbers),
        numbers=numbers,
        efficiency=costs.efficiency(grid) if suite.kind == "efficiency" else None,
        differences=differences,
        figures=drawn,
        claims=claims,
        smoke=suite.smoke,
        notes=(*suite.notes, *_settings_notes(grid, drawn), *_cell_notes(list(grid.results.values()))),
        cards=protocol.cards(grid),
        ledger=costs.ledger(grid),
        failures=tuple((failure.cell.label, failure.reason) for failure in failed.values()),
    )


def _demo_findings(grid: Grid) -> tuple[str, ...]:
    return tuple(demo.sentences(grid.suite, demo.demo_rows(grid.suite, grid.results.values())))


def checked_claims(grid: Grid) -> tuple[CheckedClaim, ...]:
    """Check each claim of a suite on its numbers."""
    from poem.bench.analysis.claims import check_claims

    states = {True: "holds", False: "does not hold", None: "cannot say"}
    found = check_claims(grid.suite, grid.results.values())
    return tuple(CheckedClaim(text=claim.text, state=states[each.holds], why=each.words) for claim, each in found)


def _claims_summary(claims: Sequence[CheckedClaim]) -> str:
    """How many claims hold, do not hold, and cannot be decided."""
    found = Counter(claim.state for claim in claims)
    holds, fails, undecided = (found[state] for state in ("holds", "does not hold", "cannot say"))
    counts = [
        f"{holds} {'holds' if holds == 1 else 'hold'}",
        f"{fails} {'does' if fails == 1 else 'do'} not hold",
        f"{undecided} open",
    ]
    shown = [text for text, number in zip(counts, (holds, fails, undecided), strict=True) if number]
    return f"Claims: {', '.join(shown)}." if shown else ""


def _cell_count(grid: Grid) -> str:
    there = "" if grid.present == grid.planned else f"{formatting.count(grid.present)} of "
    return f"{there}{formatting.plural(grid.planned, 'cell')}."


def _coverage(grid: Grid, failed: int) -> str:
    if grid.present == 0:
        text = f"No cell of this suite is there yet; it asks for {formatting.count(grid.planned)}."
    elif grid.present == grid.planned:
        text = (
            f"All {formatting.plural(grid.planned, 'cell')} are there."
            if grid.planned > 1
            else "Its one cell is there."
        )
    else:
        gap = f"a number that rests on a missing one is shown as {formatting.MISSING}"
        text = f"{formatting.count(grid.present)} of {formatting.plural(grid.planned, 'cell')} are there; {gap}."
    text += f" {formatting.plural(failed, 'cell')} failed." if failed else ""
    return text + _altered(grid.suite.altered)


def _altered(by: Sequence[str]) -> str:
    """How flags changed a suite, and what its numbers are then not comparable with."""
    limits = [each for each in by if each.startswith("limit ")]
    others = [each for each in by if each not in limits]
    text = "".join(f" Shortened by --{each}: not comparable with runs of another length." for each in limits)
    stated = f" Changed by flags, {'; '.join(others)}: not comparable with the suite as its file states it."
    return text + (stated if others else "")


def _settings_notes(grid: Grid, drawn: Sequence[Figure]) -> list[str]:
    """Notes on how learning rates were chosen, and on how times were measured, where a section has either."""
    timed = grid.suite.kind == "efficiency" or any(figure.title == "Time" for figure in drawn)
    notes = [protocol.CHOSEN] if protocol.is_chosen(grid) else []
    return notes + ([costs.timing_note(list(grid.results.values()))] if timed and grid.results else [])


def _cell_notes(results: Sequence[CellResult]) -> list[str]:
    """The notes of cells, such as on a fallback, each once with the number of cells."""
    found = Counter(note for result in results for note in result.notes)
    return [f"{note} ({formatting.plural(times, 'cell')})" for note, times in found.items()]


def _stream(grid: Grid) -> str:
    """Data, network, images, scenario, severity, batch size and seeds of a suite in one line."""
    results = list(grid.results.values())
    if not results:
        return ""
    cards = [result.card for result in results]
    data = _distinct(card.get("data") for card in cards)
    images = _distinct(formatting.count(card["n"]) for card in cards if isinstance(card.get("n"), int))
    seeds = sorted({result.cell.seed for result in results})
    batch = _distinct(result.cell.batch_size for result in results)
    scenario = _distinct(result.cell.scenario for result in results) + _severity(results)
    replaced = _replaced_networks(grid)
    bases = _distinct(f"{base}{replaced.get(base, '')}" for base in (result.cell.base for result in results))
    return f"{data} with {bases}, {images} images of each shift, {scenario}, batch size {batch}, {_seeds(seeds)}"


def _severity(results: Sequence[CellResult]) -> str:
    """Severities of the corruptions, and eta of a stream that does not wait; clean images have none."""
    cells = [result.cell for result in results]
    severities = _distinct(sorted({cell.severity for cell in cells if set(cell.corruptions) - {"clean"}}))
    speeds = _distinct(sorted({cell.eta for cell in cells if cell.eta}))
    return (f", severity {severities}" if severities else "") + (f", online with eta {speeds}" if speeds else "")


def _replaced_networks(grid: Grid) -> dict[str, str]:
    """The paper's networks that each base replaces, where rows or columns are named after them."""
    found: dict[str, dict[str, None]] = {}
    for placed in grid.suite.placed:
        for name in (placed.row, placed.column):
            if name in tables.PAPER_NETWORKS:
                found.setdefault(placed.cell.base, {})[name] = None
    return {base: f" (for {' and '.join(names)})" for base, names in found.items()}


def _seeds(seeds: Sequence[int]) -> str:
    listed = ", ".join(str(seed) for seed in seeds)
    return "one seed, so no ±" if len(seeds) == 1 else f"seeds {listed}: mean ± deviation"


def _paper_note(grid: Grid, numbers: ResultTable | None) -> str:
    paper = numbers.has_paper if numbers is not None else grid.suite.kind == "efficiency" and bool(grid.suite.numbers)
    if not paper:
        return ""
    if tables.comparable_with_paper(grid):
        return "Small, below ours: the paper's number, and ours less the paper's."
    return f"Small, below ours: the paper's number, marked \u2020 for {tables.OTHER_DATA}; so no difference is shown."


def _facts(suites: Sequence[Suite], results: Sequence[CellResult], planned: int) -> list[tuple[str, str]]:
    seeds = sorted({result.cell.seed for result in results})
    provenance = [result.provenance for result in results]
    commits = dict.fromkeys(_commit(each) for each in provenance)
    devices = dict.fromkeys(_device(result.host) for result in results)
    versions = dict.fromkeys(
        ", ".join(f"{name} {each[name]}" for name in ("poem", "torch", "python") if name in each) for each in provenance
    )
    made = dict.fromkeys(_without_seed(str(result.card.get("provenance", "not stated"))) for result in results)
    started = sorted(str(result.host["started"]) for result in results if "started" in result.host)
    facts = [
        (
            "scale",
            formatting.comma_list(list(dict.fromkeys(map(_scale, suites)))),
        ),
        ("cells", f"{formatting.count(len(results))} of {formatting.count(planned)}"),
        ("images", _images(results)),
        ("seeds", ", ".join(map(str, seeds)) + (" (one seed, so no ±)" if len(seeds) == 1 else "")),
        ("data", formatting.comma_list(list(made))),
        ("commit", formatting.comma_list(list(commits))),
        ("versions", formatting.comma_list(list(versions))),
        ("device", formatting.comma_list(list(devices))),
        ("checksums", _checksums(results)),
        ("measured", " to ".join(dict.fromkeys(each[:16].replace("T", " ") for each in (started[:1] + started[-1:])))),
    ]
    return [(name, text) for name, text in facts if text]


def _scale(suite: Suite) -> str:
    """The scale with what it stands for; a suite with networks and data of its own has the rest of its settings."""
    own = suite.scale == "tiny" and not suite.smoke
    return "tiny (networks and data are the suite's own)" if own else SCALES.get(suite.scale, suite.scale)


def _checksums(results: Sequence[CellResult]) -> str:
    """How many results match their checksum; empty for results that come from no file."""
    found = Counter(result.intact for result in results)
    if not found[True] and not found[False]:
        return ""
    counts = [f"{formatting.count(found[True])} match"]
    counts += [f"{formatting.count(found[False])} do{'es' if found[False] == 1 else ''} not"] if found[False] else []
    counts += [f"{formatting.count(found[None])} ha{'s' if found[None] == 1 else 've'} none"] if found[None] else []
    return ", ".join(counts)


def _images(results: Sequence[CellResult]) -> str:
    sizes = sorted({int(result.card["n"]) for result in results if isinstance(result.card.get("n"), int)})
    if not sizes:
        return ""
    each = (
        formatting.count(sizes[0])
        if len(sizes) == 1
        else f"{formatting.count(sizes[0])} to {formatting.count(sizes[-1])}"
    )
    answered = sum(_answered(result) for result in results)
    return f"{each} of each shift; {formatting.count(answered)} answered in all"


def _answered(result: CellResult) -> float:
    """Images with a prediction, also of batches that the adapter missed, which the ledger does not count."""
    return sum(domain.get("n", 0) for domain in result.domains.values()) or result.ledger.get("images", 0)


def _without_seed(provenance: str) -> str:
    """The provenance of data without its seed, since seeds have their own line."""
    return re.sub(r"\bseed \d+, ", "", provenance)


def _device(host: Mapping[str, Any]) -> str:
    device = str(host.get("device", "not stated"))
    return f"{device} ({host['cpu']}, {host.get('cores', '?')} cores)" if device == "cpu" and "cpu" in host else device


def _commit(provenance: Mapping[str, Any]) -> str:
    commit = str(provenance.get("commit") or "not known")[:12]
    return f"{commit}, with changes that are not committed" if provenance.get("dirty") else commit


def _distinct(values: Iterable[Any]) -> str:
    return formatting.comma_list([str(value) for value in dict.fromkeys(values) if value is not None])
