"""Turn the study's cells into tables, answers and figures, and write them into the pages that have a place for them.

    PYTHONPATH=src:benchmarks python -m study.join NEW.jsonl ...
    PYTHONPATH=src:benchmarks python -m study.analyse

Reads results/study/*.json, and results/auto/*.jsonl for networks that the suites lack. Fills the places
`<!-- study:NAME -->` ... `<!-- /study -->` of the pages, and writes docs/study/NAME.svg and
results/study/summary/answers.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from study import answers, figures, tables
from study.claims import verdicts
from study.evidence import ROOT, Evidence, load_all

PAGES = ("docs/results.md", "docs/study.md")
PLACE = re.compile(r"<!-- study:([\w.-]+) -->\n(.*?)<!-- /study -->", re.DOTALL)
FIGURES = Path("docs") / "study"
ANSWERS = Path("results") / "study" / "summary" / "answers.json"


def texts(evidence: Evidence, suites: Mapping[str, Mapping[str, Any]], earlier: Evidence) -> dict[str, str]:
    """What goes into each place: tables, answers, and links to those figures whose cells are there."""
    found = tables.all_tables(evidence, suites, earlier)
    for name, drawing in figures.drawings(evidence).items():
        link = "" if drawing is None else f"![{drawing.title}]({FIGURES.name}/{name}.svg)\n"
        found[f"figure-{name}"] = link or tables.NONE
    return found


def pages() -> dict[str, dict[str, str]]:
    """Every page with what goes into its places."""
    return dict.fromkeys(PAGES, texts(*load_all()))


def filled(page: str, found: Mapping[str, str]) -> str:
    """A page with its places filled.

    Raises:
        ValueError: A place has a name that there is no text for.
    """

    def place(match: re.Match[str]) -> str:
        if match[1] not in found:
            raise ValueError(f"expected study:NAME out of {', '.join(found)}; got study:{match[1]}")
        return f"<!-- study:{match[1]} -->\n\n{found[match[1]]}\n<!-- /study -->"

    return PLACE.sub(place, page)


def summary(evidence: Evidence) -> dict[str, Any]:
    """Answers and claims as plain values."""
    claims = [
        {"where": claim.where, "claim": claim.text,
         "networks": {net: f"{found.state} {found.words}".strip() for net, found in each.items() if found.state}}
        for claim, each in verdicts(evidence)
    ]  # fmt: skip
    return {
        "answers": {answer.name: answers.as_values(answer) for answer in answers.answers(evidence)},
        "claims": claims,
        "borrowed": evidence.borrowed,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write everything; returns 1 where there are no cells at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository, whose pages are filled")
    parser.add_argument("--print", action="store_true", help="print all texts, and write nothing")
    args = parser.parse_args(arguments)
    evidence, suites, earlier = load_all()
    if not len(evidence):
        print("expected cells in results/study; measure and join first: python -m study.measure", file=sys.stderr)
        return 1
    if args.print:
        found = texts(evidence, suites, earlier)
        print("\n".join(f"## {name}\n\n{text}" for name, text in found.items()))
        return 0
    for name, found in pages().items():
        path = args.root / name
        if path.is_file():
            path.write_text(filled(path.read_text(), found))
    (args.root / FIGURES).mkdir(parents=True, exist_ok=True)
    for name, drawing in figures.drawings(evidence).items():
        path = args.root / FIGURES / f"{name}.svg"
        if drawing is None:
            path.unlink(missing_ok=True)
            continue
        text = figures.draw(drawing)
        if len(text) > figures.MOST_BYTES:
            raise ValueError(f"expected at most {figures.MOST_BYTES:,} bytes in {path.name}, got {len(text):,}")
        path.write_text(text)
    path = args.root / ANSWERS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary(evidence), indent=1, ensure_ascii=False) + "\n")
    measured = sum(bool(line.state) for answer in answers.answers(evidence) for line in answer.lines)
    print(f"{len(evidence)} cells; {measured} lines of answers; pages: {', '.join(PAGES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
