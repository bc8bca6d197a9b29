"""A page rendered as Markdown; figures are rendered as the tables of their data."""

from __future__ import annotations

from collections.abc import Sequence

from poem._util.files import without_controls
from poem.report.differences import NOTE
from poem.report.formatting import METRICS
from poem.report.sections import SMOKE, Page, Section
from poem.report.tables import ResultRow, ResultTable, TextTable

MARKS = {"holds": "holds", "does not hold": "**does not hold**", "cannot say": "cannot say"}


def render_markdown(page: Page) -> str:
    """Render a page as Markdown."""
    lines = [f"# {escape(page.title)}", ""]
    if page.smoke:
        lines += [f"> **{SMOKE}**", ""]
    if page.picture is not None:
        lines += [escape(page.picture.caption.partition(" Shown are")[0]), ""]
    lines += ["## Contents", ""]
    for section in page.sections:
        lines.append(
            f"- [{escape(section.title)}](#{section.name}): {section.cell_count} {section.claims_summary}".rstrip()
        )
    for section in page.sections:
        lines += ["", *_section(section)]
    lines += ["", "## Provenance", "", *(f"- {name}: {escape(text)}" for name, text in page.facts)]
    return without_controls("\n".join(lines) + "\n")


def _section(section: Section) -> list[str]:
    lines = [f'<a id="{section.name}"></a>', "", f"## {escape(section.title)}", ""]
    for warning in section.warnings:
        lines += [f"> **{escape(warning)}**", ""]
    lines += [line for sentence in section.findings for line in (escape(sentence), "")]
    measured = section.stream and f"Measured on {section.stream}."
    texts = (section.readout, measured, section.coverage, section.paper_note)
    lines += [line for text in texts if text for line in (escape(text), "")]
    if section.numbers is not None:
        lines += [f"{METRICS['top1'].title}; {section.numbers.bold}.", ""]
        lines += [*_result_tables(section.numbers), ""]
    if section.differences is not None:
        lines += [escape(NOTE), ""]
        for table in section.differences.texts():
            lines += [f"{escape(table.caption)}:", "", *pipe_table(table), ""]
    if section.efficiency is not None:
        lines += [*pipe_table(_with_paper(section.efficiency)), ""]
    for figure in section.figures:
        lines += [f"### {escape(figure.title)}", "", *([escape(figure.note), ""] if figure.note else [])]
        for table in figure.data:
            lines += [escape(table.caption), "", *pipe_table(table), ""]
    if section.claims:
        where = " (on smoke data)" if section.smoke else ""
        lines += [f"The paper's claims, in our words{where}:", ""]
        for claim in section.claims:
            why = f" ({escape(claim.why)})" if claim.why else ""
            lines.append(f"- {escape(claim.text)}: {MARKS.get(claim.state, claim.state)}{why}")
        lines.append("")
    if section.failures:
        lines += ["Cells that failed:", ""]
        lines += [f"- {escape(label)}: {escape(reason)}" for label, reason in section.failures]
        lines.append("")
    lines += [f"- {escape(note)}" for note in section.notes]
    lines += [""] if section.notes else []
    for card in section.cards:
        lines += [f"Protocol, {escape(card.caption)}:", "", *pipe_table(card), ""]
    if section.ledger.rows:
        lines += [f"{escape(section.ledger.caption)}:", "", *pipe_table(section.ledger), ""]
    return lines[:-1]


def _result_tables(table: ResultTable) -> list[str]:
    """One table for each block."""
    lines = []
    for block in table.blocks:
        name = f"{block.name} ({block.role})" if block.role else block.name or table.first
        rows = [(row.name, *_entries(row), row.source) for row in block.rows]
        lines += [
            *pipe_table(TextTable(caption="", header=(name, *table.columns, "source data"), rows=tuple(rows))),
            "",
        ]
    return lines[:-1]


def _entries(row: ResultRow) -> list[str]:
    found = []
    for entry, paper, difference in zip(row.entries["top1"], row.paper, row.differences, strict=True):
        text = f"**{entry.text}**" if entry.best else entry.text
        text += f" ± {entry.deviation}" if entry.deviation else ""
        if paper:
            text += f" ({paper}, {difference})" if difference else f" ({paper})"
        found.append(text)
    return found


def _with_paper(table: TextTable) -> TextTable:
    if not table.paper:
        return table
    rows = tuple(
        tuple(f"{cell} ({number})" if number else cell for cell, number in zip(row, published, strict=True))
        for row, published in zip(table.rows, table.paper, strict=True)
    )
    return TextTable(caption=table.caption, header=table.header, rows=rows)


def pipe_table(table: TextTable) -> list[str]:
    """The lines of a Markdown table; bold cells are kept, other Markdown syntax is escaped."""
    lines = [_line(table.header), _line(["---"] + ["---:"] * (len(table.header) - 1))]
    return lines + [_line(row) for row in table.rows]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    if text.startswith("**") and text.count("**") == 2:
        return text
    return escape(text) if text.strip("-:") else text


def escape(text: str) -> str:
    """Escape Markdown and HTML syntax, and join lines."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "\\`*_[]|":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
