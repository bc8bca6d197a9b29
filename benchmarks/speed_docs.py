"""Fill README and docs with measured speeds: the places `<!-- speed:FILE WHAT -->` ... `<!-- /speed -->`.

    python benchmarks/speed_docs.py            # after a run of benchmarks/gpu_check.sh

FILE is one of results/speed/. WHAT is `rows` (all rows), `summary` (a few of them, for README), `curve` (images per
second by batch size), `picture` (the same, drawn by `speed_figure.py`), `agreement`, `contract`, `ratio` (one update
against a forward), `stream` (from files to answers), or `stacked` (streams as one batch). A file that is not there, or
is of another tree (`tree_hash.py`), is not quoted: its place says so. A test holds the pages to this.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from tree_hash import GUARDED, MEASURED, ROOT, STACKED, plain_tree, tree_hash  # noqa: E402, F401 - some for tests

PLACE = re.compile(r"<!-- speed:(\S+) (\w+) -->\n.*?<!-- /speed -->", re.DOTALL)
Content = dict[str, Any]


def pages(root: Path = ROOT) -> list[Path]:
    """README and every page of the docs."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def filled(page: str, results: Path, today: str) -> str:
    """A page with what the files of today's tree say in its places.

    Raises:
        ValueError: A place asks for something that there is not.
    """

    def place(match: re.Match[str]) -> str:
        name, what = match[1], match[2]
        if what not in SHOWN:
            raise ValueError(f"expected speed:FILE with one of {', '.join(SHOWN)}; got {what!r}")
        return f"<!-- speed:{name} {what} -->\n\n{_said(results / name, what, today)}\n\n<!-- /speed -->"

    return PLACE.sub(place, page)


def _said(path: Path, what: str, today: str) -> str:
    if not path.is_file():
        return f"Not measured yet for this version of the code (`{path.name}`)."
    content = json.loads(path.read_text())
    if content.get("tree") != today:
        return f"The numbers in `results/speed/{path.name}` are of an earlier version of the code and not quoted."
    return SHOWN[what](content)


def _good(content: Content) -> list[Content]:
    """Rows without an error; those with a guard only where its code is as it was."""
    same = content.get("guarded") == tree_hash(names=GUARDED)
    return [row for row in content["rows"] if row["status"] == "ok" and (same or not _is_guarded(row))]


def _is_guarded(row: Content) -> bool:
    return str(row.get("method", "")).startswith("guarded")


def _left_out(content: Content, rows: list[Content]) -> str:
    """Sentences about rows with a guard that are not quoted, and about those that the run's time did not suffice for.

    `rows` are those that the table shows: it leaves out networks that are in another table alone.
    """
    said = ""
    if any(map(_is_guarded, content["rows"])) and not any(map(_is_guarded, _good(content))):
        said += "\n\nRows with a guard are of an earlier version of its code and not quoted."
    there = {" ".join(str(row.get(key)) for key in ROW) for row in content["rows"]}
    elsewhere = {str(row["net"]) for row in _good(content)} - {str(row["net"]) for row in rows}
    skipped = [each for each in content.get("skipped", ()) if each.split()[0] not in elsewhere]
    skipped = [each for each in skipped if _named(each) not in there]
    if skipped:
        said += f"\n\nNot measured, since the run's time ended: {', '.join(skipped)}."
    return said


def _named(skipped: str) -> str:
    """The `ROW` of a row that was left out, which is written `NET batch SIZE METHOD MODE SHARE %`."""
    net, _, batch, method, mode, share, _ = skipped.split()
    return f"{net} {method} {mode} {batch} {share}"


ROW = ("net", "method", "mode", "batch", "select")
"""What tells one row of a file from another."""


def _mode(row: Content) -> str:
    return str(row["mode"]) if row.get("as_asked", True) else f"{row['mode']}, ran eagerly"


def _selected(row: Content) -> str:
    return f"{row['select']} %" if row["method"] not in AS_THEY_DO else "-"


AS_THEY_DO = ("forward", "source", "bn", "auto", "guarded-auto")
"""Rows whose selection is not forced."""


def _rows(content: Content) -> str:
    rows = [row for row in _good(content) if row.get("curve") is None]
    lines = [
        [row["net"], row["batch"], row["method"], _mode(row), _selected(row), f"{row['images_per_s']:.0f}",
         f"{row['median_ms']:.2f}", _or_dash(row["ratio_to_source"], ".2f"), _or_dash(row["share_of_limit"], ".0%"),
         _or_dash(row["peak_allocated_mib"], "d"), _or_dash(row.get("memory_over_tent"), ".2f")]
        for row in rows
    ]  # fmt: skip
    heads = [
        "network",
        "batch",
        "method",
        "mode",
        "selected",
        "images/s",
        "ms",
        "x source",
        "of limit",
        "MiB",
        "x Tent",
    ]
    return f"{_machine(content)}\n\n{_table(heads, lines)}{_left_out(content, rows)}"


def _machine(content: Content) -> str:
    """The device and torch that a file was measured with."""
    about = {**content, **content.get("host", {})}
    return f"{about['device'].replace('cpu', 'a CPU')}, torch {about['torch']}:"


SUMMARISED = {
    "source": "the model as it is", "tent": "Tent", "poem1": "POEM, one update", "poem2": "POEM, two updates",
    "guarded-auto": "`auto`, guarded",
}  # fmt: skip


def _summary(content: Content) -> str:
    rows = {(row["method"], row["batch"]): row for row in _good(content) if _mode(row) == "bf16"}
    lines = []
    for method, words in SUMMARISED.items():
        many, one = rows.get((method, 64)), rows.get((method, 1))
        if many is not None and one is not None:
            share = _or_dash(many["share_of_limit"], ".0%")
            lines.append([words, f"{many['images_per_s']:.0f}", share, f"{one['median_ms']:.1f}"])
    return _table(["method", "images/s, batches of 64", "of limit", "ms for one image"], lines) + _left_out(
        content, _good(content)
    )


def _curve(content: Content) -> str:
    rows = [row for row in _good(content) if row.get("curve") == "batch"]
    batches = sorted({row["batch"] for row in rows})
    speeds = {(row["net"], row["batch"]): f"{row['images_per_s']:.0f}" for row in rows}
    nets = sorted({row["net"] for row in rows})
    lines = [[net, *(speeds.get((net, batch), "-") for batch in batches)] for net in nets]
    table = _table(["POEM, one update, bf16: images/s at batch", *map(str, batches)], lines)
    return f"{_machine(content)}\n\n{table}{_left_out(content, rows)}"


def _picture(content: Content) -> str:
    words = "POEM with one update, bf16: images per second and milliseconds of a call over the batch size"
    return f"![{words}, for {len({row['net'] for row in _good(content)})} networks](speed_curves.png)"


def _agreement(content: Content) -> str:
    found: dict[str, list[Content]] = {}
    for row in content["rows"]:  # of a stage that passed, and so without errors
        found.setdefault(row["network"], []).append(row)
    lines = [
        [net, len({row["method"] for row in rows}), min(row["batches"] for row in rows),
         sum(row["captured"] for row in rows), f"{max(row['largest_difference_of_probabilities'] for row in rows):.1g}",
         sum(row["largest_difference_of_probabilities"] == 0 for row in rows),
         sum(row["selected_by_one_alone"] for row in rows)]
        for net, rows in sorted(found.items())
    ]  # fmt: skip
    heads = ["network", "methods", "batches", "methods captured", "largest difference", "methods equal to the bit",
             "selected by one alone"]  # fmt: skip
    return f"{_machine(content)}\n\n{_table(heads, lines)}"


def _contract(content: Content) -> str:
    """Number of tests; the stage writes the file only where none failed."""
    return f"{content['passed']} tests of the contract passed on a GPU with `fast=True`, {content['failed']} failed."


def _ratio(content: Content) -> str:
    found = content["ratio"]
    return (
        f"{found['net']}, batch {found['batch']}, {found['threads']} threads, {_machine(content)} POEM with one update "
        f"takes **{found['ratio']:.2f}** times a plain forward (median of {found['pairs']} pairs)."
    )


def _stream(content: Content) -> str:
    lines = [
        [row["images"], row["workers"], f"{row['loader_images_per_s']:.0f}", f"{row['adapter_images_per_s']:.0f}",
         f"{row['run_images_per_s']:.0f}", f"{row['of_adapter']:.0%}", f"{row['over_in_turn']:.2f}"]
        for row in _good(content)
    ]  # fmt: skip
    heads = ["images", "loader processes", "loader alone, images/s", "adapter alone", "run", "of adapter", "x in turn"]
    return f"{content['device']}, {content['cores']} cores:\n\n{_table(heads, lines)}"


def _stacked(content: Content) -> str:
    if content.get("serve") != tree_hash(names=STACKED):
        return "The numbers in `results/speed/stacked.json` are of an earlier version of the service and not quoted."
    lines = [
        [f"`{row['method']}`", f"{row['stacked']:.0f}", f"{row['turns']:.0f}", f"{row['one_stream']:.0f}",
         f"{row['ratio']:.0%}", f"{row['difference']:.0e}"]
        for row in content["rows"]
    ]  # fmt: skip
    heads = ["method", "stacked, images/s", "in turn", "one stream, batches of 64", "stacked over one stream",
             "largest difference in probability"]  # fmt: skip
    return f"{content['device']}, {content['streams']} streams:\n\n{_table(heads, lines)}"


SHOWN: dict[str, Callable[[Content], str]] = {
    "rows": _rows, "summary": _summary, "curve": _curve, "picture": _picture,
    "agreement": _agreement, "ratio": _ratio, "stream": _stream, "stacked": _stacked,
    "contract": _contract,
}  # fmt: skip


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(heads: list[str], lines: list[list[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [heads, ["---"] * len(heads), *lines])


def main(arguments: list[str] | None = None) -> int:
    """Fill every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    today = tree_hash()
    for path in pages():
        text = path.read_text()
        new = filled(text, ROOT / "results" / "speed", today)
        if new != text:
            path.write_text(new)
            print(f"filled {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
