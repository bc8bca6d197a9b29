"""Cells with the correctness of every sample, so that two rows can be compared pair by pair.

They come from three kinds of files: a suite of a study, which is one JSON object; lines of JSON, one cell each; and
results of `poem run` and `poem bench` (`poem.bench.leaderboard_rows`). A suite:

    {"format": 1, "suite": "cifar10", "protocol": "in words",
     "runs": {"3f2a": {"command": ..., "tree": ..., "torch": ..., "device": ...}},
     "cells": [{"net": "cifar10-bn", "row": "tent", "stream": "fog-5", "seed": 0, "batch": 64, "n": 2000, "right": 1391,
                "bits": "...", "hash": "a7082cdf", "seconds": 1.4, "run": "3f2a"}, ...]}

A cell that was taken over from earlier results has `from`, where they are, and `tree` instead of `run`.
`bits` are those of `bits_text`. `hash` is of the stream's images and labels: only cells with equal ones are paired.
A cell without `right` that states an `error` failed and is left out. Other fields of cells and files are not read.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poem._util.files import read_json, read_text
from poem.streams.corruptions import CORRUPTIONS

HASH_DIGITS = 16
"""Digits of the SHA-256 of a stream's labels in a result."""
FACTS = ("command", "tree", "torch", "device")
"""What the provenance of a suite's cells has to state."""


@dataclass(frozen=True, kw_only=True)
class SampleCell:
    """What one row answered on one stream of one network."""

    net: str
    row: str
    stream: str
    seed: int
    batch: int
    n: int
    right: int
    hash: str
    """Of the stream: cells with equal ones saw the same samples in the same order."""
    bits: NDArray[np.bool_] | None
    """(n,) which answers were right; None where that is not known."""
    seconds: float | None = None
    """In the adapter."""
    protocol: str = ""
    """In words: cells with different ones are never compared."""
    provenance: tuple[tuple[str, str], ...] = ()
    """Names and values: command, tree or commit, versions, device, file."""
    images: str = "repeated"
    """What is known of the images behind the samples: `in order`, where sample i shows image i of the seed in every
    stream of the protocol; `once`, where each comes once and the order is not known; `repeated`, where some may come
    again and it is not known which."""


def bits_text(bits: NDArray[np.bool_]) -> str:
    """Bits as text: eight to a byte as `numpy.packbits` does, base64."""
    return base64.b64encode(np.packbits(bits).tobytes()).decode()


def read_bits(text: str, n: int) -> NDArray[np.bool_]:
    """The n bits that `bits_text` wrote.

    Raises:
        ValueError: The text is no base64, or of another number of bits.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"expected bits as base64, got {text[:40]!r}") from error
    if len(raw) != (n + 7) // 8:
        raise ValueError(f"expected {(n + 7) // 8} bytes for {n} bits, got {len(raw)}")
    found = np.unpackbits(np.frombuffer(raw, np.uint8))
    if found[n:].any():
        raise ValueError(f"expected {n} bits, got more")
    return found[:n].astype(bool)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and len(value) <= 500


def _integer(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "net": (_text, "a network's name"),
    "row": (_text, "a row's name"),
    "stream": (_text, "a stream's name"),
    "hash": (_text, "the hash of the stream"),
    "seed": (_integer(0), "an integer of at least 0"),
    "batch": (_integer(1), "an integer of at least 1"),
    "n": (_integer(1), "an integer of at least 1"),
    "right": (_integer(0), "an integer of at least 0"),
    "bits": (lambda value: isinstance(value, str), "base64 of numpy.packbits"),
}
"""Fields that a cell must have: their check, and the same in words."""


def read_sample_cell(values: Any, protocol: str, provenance: Mapping[str, str]) -> SampleCell:
    """A cell from its JSON object.

    Raises:
        ValueError: A field is missing, or holds something else, or `right` is not the number of bits.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"expected a cell as an object, got a {type(values).__name__}")
    for name, (fits, words) in _FIELDS.items():
        if name not in values:
            raise ValueError(f"{name} is missing; expected {words}")
        if not fits(values[name]):
            raise ValueError(f"expected {name} as {words}, got {str(values[name])[:60]!r}")
    bits = read_bits(values["bits"], values["n"])
    if int(bits.sum()) != values["right"]:
        raise ValueError(f"expected right as the number of bits that are set, {int(bits.sum())}, got {values['right']}")
    seconds = values.get("seconds")
    if seconds is not None and not (isinstance(seconds, (int, float)) and 0 <= seconds < 1e12):
        raise ValueError(f"expected seconds as a number of at least 0, got {str(seconds)[:60]!r}")
    plain = {name: values[name] for name in _FIELDS if name != "bits"}
    facts = tuple(sorted(provenance.items()))
    images = _images(values["stream"])
    return SampleCell(**plain, bits=bits, seconds=seconds, protocol=protocol, provenance=facts, images=images)


def _images(stream: str) -> str:
    """What the name of a suite's stream says of its images."""
    name, _, severity = stream.rpartition("-")
    if stream in ("clean", "mixed", "noise") or (name in CORRUPTIONS and severity.isdigit()):
        return "in order"
    return "once" if stream.startswith("sorted-") else "repeated"


def read_suite(path: Path) -> list[SampleCell]:
    """The cells of a suite's JSON file.

    Raises:
        ValueError: The file is no suite, a cell is none, or lacks its provenance; the message names file and cell.
    """
    held = read_json(path)
    if not isinstance(held, Mapping) or not isinstance(held.get("cells"), list):
        raise ValueError(f"expected a suite with a list of cells in {path}, got another file")
    if held.get("format") != 1:
        raise ValueError(f"expected a suite of format 1 in {path}, got format {str(held.get('format'))[:40]!r}")
    suite = str(held.get("suite") or path.stem)
    words = held.get("protocol")
    protocol = f"{suite}: {words}" if isinstance(words, str) and words else suite
    try:
        runs = _runs(held.get("runs"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return list(_cells(held["cells"], path, protocol, runs))


def read_lines(path: Path) -> list[SampleCell]:
    """The cells of a file with one cell a line; `NAME.runs.json` beside it, where there is one, states the runs.

    Raises:
        ValueError: A line is no cell; the message names it.
    """
    cells = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            cells.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"expected a cell in line {number} of {path}, got {line[:60]!r}") from error
    beside = path.with_suffix(".runs.json")
    runs = _runs(read_json(beside)) if beside.is_file() else None
    return list(_cells(cells, path, f"cells of {path.parent.name or path.stem}", runs))


def _runs(values: Any) -> dict[str, dict[str, str]]:
    """The facts of each run by its name."""
    if not isinstance(values, Mapping) or not all(isinstance(each, Mapping) for each in values.values()):
        raise ValueError(f"expected runs by name, each with {', '.join(FACTS)}, got {str(values)[:60]!r}")
    return {
        str(run): {str(name): str(value) for name, value in facts.items() if _plain(value)}
        for run, facts in values.items()
    }


def _plain(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and value != ""


def _cells(
    cells: list[Any], path: Path, protocol: str, runs: Mapping[str, Mapping[str, str]] | None
) -> Iterator[SampleCell]:
    """Cells of a file; where runs are given, each cell needs the facts of its run."""
    for number, values in enumerate(cells, 1):
        if isinstance(values, Mapping) and "error" in values and "right" not in values:
            continue
        held = values if isinstance(values, Mapping) else {}
        own = {"tree": str(held["tree"])} if _plain(held.get("tree")) else {}
        try:
            yield read_sample_cell(values, protocol, {"file": path.name, **own, **_facts(held, runs)})
        except ValueError as error:
            named = " ".join(str(held[name])[:40] for name in ("net", "row", "stream") if name in held)
            raise ValueError(f"{path}, cell {number}{f' ({named})' if named else ''}: {error}") from error


def _facts(values: Mapping[str, Any], runs: Mapping[str, Mapping[str, str]] | None) -> dict[str, str]:
    """The facts of a cell's run.

    Raises:
        ValueError: There is no such run, or it lacks some of `FACTS`.
    """
    if runs is None:
        return {}
    if "run" not in values and _plain(values.get("from")) and _plain(values.get("tree")):
        return {"from": str(values["from"])}
    name = str(values.get("run"))
    if name not in runs:
        raise ValueError(f"expected run as one of {', '.join(runs) or 'none'}, or from and tree, got {name[:40]!r}")
    missing = [fact for fact in FACTS if fact not in {**runs[name], **values}]
    if missing:
        raise ValueError(f"its run {name!r} does not state {', '.join(missing)}")
    return dict(runs[name])
