"""The tables of a page to take along: LaTeX (booktabs), CSV, Markdown, JSON, and pandas frames.

    for table in export_tables(page):
        print(table.latex())
        frame = table.frame()

Numbers are the measured ones, not rounded, in CSV, JSON and frames; as on the page in LaTeX and Markdown.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poem._util.files import printable, without_controls
from poem.report.differences import NOTE, DifferenceTable
from poem.report.formatting import MISSING, MetricLabel
from poem.report.markdown import escape, pipe_table
from poem.report.sections import Page, Section
from poem.report.tables import PAPER_NETWORKS, Entry, ResultTable, TextTable

if TYPE_CHECKING:
    import pandas

    from poem.bench.suites import Suite

Value = float | str | None


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """One cell of a table: its text as on a page, and its value."""

    text: str
    value: Value
    deviation: float | None = None
    """Standard deviation over seeds; None for a single seed."""
    deviation_text: str = ""
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class TableBlock:
    """Rows of one network; its name is empty where a table has a single block."""

    name: str
    rows: tuple[tuple[str, tuple[TableCell, ...]], ...]
    """The name of each row, and its cells."""
    label: str = ""
    """What the suite calls the network, for LaTeX; empty for its name."""


@dataclass(frozen=True, kw_only=True)
class ExportTable:
    """One table of a report."""

    name: str
    """Stem of its file and LaTeX label: `table1-top1`, `table1-costs`."""
    caption: str
    first: str
    """Header of the column that names the rows."""
    columns: tuple[str, ...]
    blocks: tuple[TableBlock, ...]
    families: tuple[tuple[str, int], ...] = ()
    """Titles above the columns, each with the number of columns that it spans."""

    @property
    def _named_blocks(self) -> bool:
        return any(block.name for block in self.blocks)

    @property
    def _deviating(self) -> tuple[bool, ...]:
        """For each column, whether some cell has a deviation."""
        cells = [row for block in self.blocks for _, row in block.rows]
        return tuple(any(row[at].deviation is not None for row in cells) for at in range(len(self.columns)))

    @property
    def _alignment(self) -> str:
        """For each column, `r` where it holds numbers alone, else `l`."""
        cells = [row for block in self.blocks for _, row in block.rows]
        words = (any(isinstance(row[at].value, str) for row in cells) for at in range(len(self.columns)))
        return "".join("l" if each else "r" for each in words)

    @property
    def header(self) -> tuple[str, ...]:
        """Column names of CSV, JSON and frames; a deviation has a column of its own after that of its mean."""
        means = [
            name
            for column, spread in zip(_unique(self.columns), self._deviating, strict=True)
            for name in (column, *([f"{column} ±"] if spread else []))
        ]
        return (*(["network"] if self._named_blocks else []), self.first.lower(), *means)

    def records(self) -> Iterator[tuple[Value, ...]]:
        """The rows below `header`; a missing number is None."""
        for block in self.blocks:
            for name, cells in block.rows:
                values: list[Value] = [block.name] if self._named_blocks else []
                values.append(name)
                for cell, spread in zip(cells, self._deviating, strict=True):
                    values += [cell.value, cell.deviation] if spread else [cell.value]
                yield tuple(values)

    def csv(self) -> str:
        """Comma-separated values with a header; a missing number is an empty field."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([one_line(name) for name in self.header])
        for record in self.records():
            writer.writerow(
                ["" if each is None else one_line(each) if isinstance(each, str) else each for each in record]
            )
        return out.getvalue()

    def json(self) -> str:
        """An object with the caption, the columns and the rows."""
        rows = [dict(zip(self.header, record, strict=True)) for record in self.records()]
        fields = {"name": self.name, "caption": self.caption, "columns": self.header, "rows": rows}
        return without_controls(json.dumps(fields, indent=1, ensure_ascii=False), "\\u{:04x}") + "\n"

    def frame(self) -> pandas.DataFrame:
        """A pandas frame with the columns of `header`; its caption is in `frame.attrs`.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("a frame needs pandas; type: pip install pandas") from error
        found = pandas.DataFrame(list(self.records()), columns=list(self.header))
        found.attrs["caption"] = self.caption
        return found

    def markdown(self) -> str:
        """One pipe table per block."""
        lines = [escape(self.caption), ""]
        for block in self.blocks:
            rows = tuple((name, *(_plain(cell, bold="**{}**") for cell in cells)) for name, cells in block.rows)
            table = TextTable(caption="", header=(block.name or self.first, *self.columns), rows=rows)
            lines += [*pipe_table(table), ""]
        return "\n".join(lines)

    def text(self) -> str:
        """Columns aligned with spaces, for a terminal."""
        lines = []
        for block in self.blocks:
            rows = [[name, *(_plain(cell) for cell in cells)] for name, cells in block.rows]
            table = [[block.name or self.first, *self.columns], *rows]
            widths = [max(len(one_line(row[at])) for row in table) for at in range(len(table[0]))]
            for row in table:
                first, *rest = (one_line(each) for each in row)
                cells = [
                    first.ljust(widths[0]),
                    *(each.rjust(width) for each, width in zip(rest, widths[1:], strict=True)),
                ]
                lines.append("  ".join(cells).rstrip())
            lines.append("")
        return "\n".join(lines[:-1])

    def latex(self) -> str:
        r"""A `table` with a booktabs `tabular`: \toprule, families over \cmidrule, blocks between \midrule."""
        count = len(self.columns) + 1
        lines = [
            r"% \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex_escape(self.caption)}}}",
        ]
        lines += [rf"\label{{tab:{self.name}}}", rf"\begin{{tabular}}{{l{self._alignment}}}", r"\toprule"]
        if any(title for title, _ in self.families):
            lines += self._latex_families()
        lines.append(_latex_row([latex_escape(self.first), *map(latex_escape, self.columns)]))
        for block in self.blocks:
            lines.append(r"\midrule")
            if self._named_blocks:
                title = rf"\multicolumn{{{count}}}{{l}}{{\textit{{{latex_escape(block.label or block.name)}}}}}"
                lines += [rf"{title} \\"]
            lines += [_latex_row([latex_escape(name), *map(_latex_cell, cells)]) for name, cells in block.rows]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"

    def _latex_families(self) -> list[str]:
        cells, rules, at = [""], [], 2
        for title, span in self.families:
            cells.append(rf"\multicolumn{{{span}}}{{c}}{{{latex_escape(title)}}}")
            rules += [rf"\cmidrule(lr){{{at}-{at + span - 1}}}"] if title else []
            at += span
        return [_latex_row(cells), " ".join(rules)]


def _unique(names: Sequence[str]) -> list[str]:
    """Names, each once: a second `a` becomes `a (2)`."""
    found: list[str] = []
    for name in names:
        same, number = name, 2
        while same in found:
            same, number = f"{name} ({number})", number + 1
        found.append(same)
    return found


def _plain(cell: TableCell, bold: str = "{}") -> str:
    text = bold.format(cell.text) if cell.best else cell.text
    return f"{text} ± {cell.deviation_text}" if cell.deviation_text else text


def _latex_cell(cell: TableCell) -> str:
    text = latex_escape(cell.text)
    text = rf"\textbf{{{text}}}" if cell.best else text
    return rf"{text} $\pm$ {latex_escape(cell.deviation_text)}" if cell.deviation_text else text


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "\u2212": "$-$", "\u00d7": r"$\times$", "\u00b1": r"$\pm$", "\u2013": "--", "\u2020": r"\dag{}", "\u2192": r"$\to$",
}  # fmt: skip


def latex_escape(text: str) -> str:
    """Text for LaTeX, on one line; characters of other scripts stay, for XeLaTeX and LuaLaTeX."""
    return "".join(_LATEX.get(each, each) for each in one_line(text))


def one_line(text: str) -> str:
    """Text on one line: line ends become spaces, other control characters and bytes that are no UTF-8 escapes."""
    return printable(" ".join(text.split()))


def export_tables(page: Page) -> list[ExportTable]:
    """Every table of a page: results by metric, differences, costs, data of figures, protocol cards."""
    return [table for section in page.sections for table in _section_tables(section)]


def _section_tables(section: Section) -> Iterator[ExportTable]:
    section = dataclasses.replace(section, name=re.sub(r"[^\w.-]+", "-", section.name).strip(".-") or "suite")
    if section.numbers is not None:
        for metric in section.numbers.metrics:
            yield _result_table(section, section.numbers, metric)
    if section.differences is not None:
        yield _difference_table(section, section.differences)
    measured = _measured(section)
    if section.efficiency is not None:
        yield text_table(f"{section.name}-efficiency", section.efficiency, section.title, measured)
    drawn = [table for figure in section.figures for table in figure.data]
    for number, table in enumerate(drawn, start=1):
        yield text_table(f"{section.name}-figure{number}", table, section.title, measured)
    if section.ledger.rows:
        yield text_table(f"{section.name}-costs", section.ledger, section.title, measured)
    for number, card in enumerate(section.cards, start=1):
        yield text_table(f"{section.name}-protocol{number}", card, section.title)


def _measured(section: Section) -> str:
    """The protocol as sentences of a caption: which answers count; data, severity, batch size and seeds."""
    stream = f"Measured on {section.stream}." if section.stream else ""
    return " ".join(each for each in (section.readout.strip(), stream) if each)


def _result_table(section: Section, table: ResultTable, metric: MetricLabel) -> ExportTable:
    blocks = tuple(
        TableBlock(
            name=f"{block.name} ({block.role})" if block.role else block.name,
            rows=tuple((row.name, tuple(map(_cell, row.entries[metric.key]))) for row in block.rows),
            label=_label(block.role),
        )
        for block in table.blocks
    )
    return ExportTable(
        name=f"{section.name}-{metric.key}",
        caption=f"{section.title}. {metric.title}. {_measured(section)}".rstrip(),
        first=table.first,
        columns=table.column_headers if table.families else table.columns,
        families=table.families,
        blocks=blocks,
    )


def _difference_table(section: Section, table: DifferenceTable) -> ExportTable:
    blocks = tuple(
        TableBlock(
            name=block.title,
            label=_label(block.role),
            rows=tuple((name, tuple(map(_cell, entries))) for name, entries in block.rows),
        )
        for block in table.blocks
    )
    return ExportTable(
        name=f"{section.name}-differences",
        caption=f"{section.title}. {table.caption}. {NOTE} {_measured(section)}".rstrip(),
        first=table.first,
        columns=table.columns,
        blocks=blocks,
    )


def _label(role: str) -> str:
    """A group's label of the user's own; empty for the paper's networks, whose place ours take."""
    return "" if role.endswith(PAPER_NETWORKS) and "the paper's" in role else role


def _cell(entry: Entry) -> TableCell:
    return TableCell(
        text=entry.text, value=entry.mean, deviation=entry.spread, deviation_text=entry.deviation, best=entry.best
    )


def paper_table(suite: Suite) -> ExportTable:
    """The paper's own numbers of a table, without a run.

    Raises:
        ValueError: The paper prints no numbers for this suite, as for a figure.
    """
    if not suite.numbers:
        raise ValueError(
            f"the paper prints no numbers for {suite.name}; poem reproduce {suite.name} measures ours, and poem list "
            "suites names the tables"
        )
    rows = [row for group in suite.numbers.values() for row in group.values()]
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    large = {column: max(row.get(column, 0.0) for row in rows) >= 1000 for column in columns}
    blocks = tuple(
        TableBlock(
            name=group,
            rows=tuple(
                (name, tuple(_paper_cell(row.get(each), large[each]) for each in columns))
                for name, row in named.items()
            ),
        )
        for group, named in suite.numbers.items()
    )
    caption = f"{suite.title}. The paper's numbers"
    return ExportTable(name=f"{suite.name}-paper", caption=caption, first="Row", columns=columns, blocks=blocks)


def _paper_cell(value: float | None, large: bool) -> TableCell:
    """A number with one decimal, as the paper prints accuracies, or as a count in a column of large ones."""
    text = MISSING if value is None else f"{value:,.0f}" if large else f"{value:.1f}"
    return TableCell(text=text, value=value)


def text_table(name: str, table: TextTable, title: str = "", measured: str = "") -> ExportTable:
    """A table of text; cells that are numbers become numbers. `measured` ends its caption."""
    cells = tuple(
        (row[0] if row else "", tuple(TableCell(text=text, value=_number(text)) for text in row[1:]))
        for row in table.rows
    )
    caption = ". ".join(part.rstrip(".") for part in (title, table.caption, measured) if part)
    caption += "." if measured else ""
    return ExportTable(
        name=name, caption=caption, first=table.header[0] or "row", columns=table.header[1:],
        blocks=(TableBlock(name="", rows=cells),),
    )  # fmt: skip


def _number(text: str) -> Value:
    """A cell's number, None for a missing one, or its text."""
    if text in ("", MISSING):
        return None
    try:
        return float(text.replace(",", "").replace("\u2212", "-"))
    except ValueError:
        return text


TABLE_FORMATS: dict[str, tuple[str, Callable[[ExportTable], str]]] = {
    "latex": (".tex", ExportTable.latex),
    "csv": (".csv", ExportTable.csv),
    "json": (".json", ExportTable.json),
}
"""Formats with a file for each table: the ending, and the function that writes it."""
PAGE_FORMATS = ("markdown", "html")
"""Formats with one file for everything."""
FORMATS = (*PAGE_FORMATS, *TABLE_FORMATS)
