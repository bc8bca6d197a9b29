"""What a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from poem._util import limits


def test_memory_is_the_machine_s_or_the_container_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "memory.max"
    monkeypatch.setattr(limits, "_CONTAINER_LIMITS", (str(tmp_path / "none"), str(file)))
    whole = limits.memory()
    assert whole > 1 << 28
    for text, found in (("max\n", whole), ("268435456\n", 1 << 28), (f"{1 << 62}\n", whole)):
        file.write_text(text)
        assert limits.memory() == found
