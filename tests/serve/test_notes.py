"""Messages that name arguments of Python: known by their text, and said as an operator of a service would do it."""

from __future__ import annotations

import ast
import logging
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from poem.engine.accounting import anomaly_texts
from poem.recipes import known_losses
from poem.serve.notes import NOTES, PHRASES, NotesOnce

LOGGED = {"runs as ETA": "poem.api", "almost no sample": "poem.engine.state", "guard=True": "poem.recipes.known_losses"}
"""In which module each message is logged, by some of its words."""


def texts(module: str) -> set[str]:
    """All texts of a module, those of several lines as one."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def test_every_message_is_worded_as_the_module_logs_it() -> None:
    for note in NOTES:
        (module,) = [place for words, place in LOGGED.items() if words in note]
        assert note in texts(module), f"{module} logs it in other words"
    diverged = anomaly_texts(torch.tensor([1, 0]))["not finite"]
    assert [phrase in diverged for phrase in PHRASES] == [True]


def test_a_note_has_as_many_arguments_as_before() -> None:
    for note, words in NOTES.items():
        assert [note.count(kind) for kind in ("%s", "%d", "%r")] == [words.count(kind) for kind in ("%s", "%d", "%r")]


def test_what_is_logged_names_options_and_routes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, once = logging.getLogger("poem"), NotesOnce()
    monkeypatch.setattr(known_losses, "_told", set())
    log.addFilter(once)
    try:
        for _ in range(2):
            known_losses.warn_of_loss("tent", nn.Sequential(nn.BatchNorm2d(3)))
            known_losses._told.clear()
            log.warning("%s on %s: %s", "tent", "Net", anomaly_texts(torch.tensor([2, 0]))["not finite"])
    finally:
        log.removeFilter(once)
    said = [record.getMessage() for record in caplog.records]
    assert [each.count("--no-guard") for each in said] == [1, 0, 0], "a note once, other messages each time"
    assert all("POST /v1/streams/ID/reset" in each for each in said[1:])
    assert not any(word in each for each in said for word in ("guard=", "lr=,", "adapter.reset"))
