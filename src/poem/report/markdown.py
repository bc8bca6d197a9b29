"""The page as Markdown: the same tables and claims; figures as their data."""

from __future__ import annotations

from collections.abc import Sequence

from poem.report.sections import SMOKE, Page, Section
from poem.report.tables import Numbers, Plain, Row
from poem.report.words import METRICS

MARKS = {"holds": "holds", "does not hold": "**does not hold**", "cannot say": "cannot say"}


def markdown(page: Page) -> str:
    """The whole page."""
    lines = [f"# {escaped(page.title)}", ""]
    if page.smoke:
        lines += [f"> **{SMOKE}**", ""]
    lines += [f"- {name}: {escaped(text)}" for name, text in page.facts]
    lines += ["", "## Contents", ""]
    for section in page.sections:
        lines.append(f"- [{escaped(section.title)}](#{section.name}): {section.brief} {section.score}".rstrip())
    for section in page.sections:
        lines += ["", *_section(section)]
    return "\n".join(lines) + "\n"


def _section(section: Section) -> list[str]:
    lines = [f'<a id="{section.name}"></a>', "", f"## {escaped(section.title)}", ""]
    for warning in section.warnings:
        lines += [f"> **{escaped(warning)}**", ""]
    measured = section.stream and f"Measured on {section.stream}."
    said = (section.readout, measured, section.coverage, section.remark)
    lines += [line for text in said if text for line in (escaped(text), "")]
    if section.numbers is not None:
        lines += [f"{METRICS['top1'].title}; {section.numbers.bold}.", ""]
        lines += [*_numbers(section.numbers), ""]
    lines += [line for sentence in section.said for line in (escaped(sentence), "")]
    if section.efficiency is not None:
        lines += [*plain(_with_paper(section.efficiency)), ""]
    for figure in section.figures:
        lines += [f"### {escaped(figure.title)}", "", *([escaped(figure.note), ""] if figure.note else [])]
        for table in figure.data:
            lines += [escaped(table.caption), "", *plain(table), ""]
    if section.claims:
        where = " (on smoke data)" if section.smoke else ""
        lines += [f"The paper's claims, in our words{where}:", ""]
        for claim in section.claims:
            why = f" ({escaped(claim.why)})" if claim.why else ""
            lines.append(f"- {escaped(claim.text)}: {MARKS.get(claim.state, claim.state)}{why}")
        lines.append("")
    if section.failures:
        lines += ["Cells that failed:", ""]
        lines += [f"- {escaped(label)}: {escaped(reason)}" for label, reason in section.failures]
        lines.append("")
    lines += [f"- {escaped(note)}" for note in section.notes]
    lines += [""] if section.notes else []
    for card in section.cards:
        lines += [f"Protocol, {escaped(card.caption)}:", "", *plain(card), ""]
    if section.ledger.rows:
        lines += [f"{escaped(section.ledger.caption)}:", "", *plain(section.ledger), ""]
    return lines[:-1]


def _numbers(table: Numbers) -> list[str]:
    """One table per block, so that each reads on its own."""
    lines = []
    for block in table.blocks:
        name = f"{block.name} ({block.role})" if block.role else block.name or table.first
        rows = [(row.name, *_entries(row), row.source) for row in block.rows]
        lines += [
            *plain(Plain(caption="", head=(name, *table.columns, "source data"), rows=tuple(rows))),
            "",
        ]
    return lines[:-1]


def _entries(row: Row) -> list[str]:
    found = []
    for entry, paper, difference in zip(row.entries["top1"], row.paper, row.differences, strict=True):
        text = f"**{entry.text}**" if entry.best else entry.text
        text += f" ± {entry.deviation}" if entry.deviation else ""
        if paper:
            text += f" ({paper}, {difference})" if difference else f" ({paper})"
        found.append(text)
    return found


def _with_paper(table: Plain) -> Plain:
    if not table.paper:
        return table
    rows = tuple(
        tuple(f"{cell} ({their})" if their else cell for cell, their in zip(row, theirs, strict=True))
        for row, theirs in zip(table.rows, table.paper, strict=True)
    )
    return Plain(caption=table.caption, head=table.head, rows=rows)


def plain(table: Plain) -> list[str]:
    """A table in pipes; bold and arrows stay as they are, everything else that Markdown would read is escaped."""
    lines = [_line(table.head), _line(["---"] + ["---:"] * (len(table.head) - 1))]
    return lines + [_line(row) for row in table.rows]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    if text.startswith("**") and text.count("**") == 2:
        return text
    return escaped(text) if text.strip("-:") else text


def escaped(text: str) -> str:
    """Words as they are, whatever Markdown or HTML would make of them."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "\\`*_[]|":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
