"""Reading files."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from poem._util.files import read_bytes


def test_a_file_takes_the_memory_that_it_fills(tmp_path: Path) -> None:
    file, content = tmp_path / "a", bytes(range(256)) * 100
    file.write_bytes(content)
    tracemalloc.start()
    assert read_bytes(file, 1 << 30) == content
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(content), "not the gigabyte that it may have"
    assert read_bytes(file) == read_bytes(file, len(content)) == content
    with pytest.raises(OSError, match="expected at most 25599 bytes, got 25600"):
        read_bytes(file, len(content) - 1)
    file.write_bytes(b"")
    assert read_bytes(file, 10) == b""


def test_a_file_that_is_larger_than_it_says_is_read_to_the_limit() -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("reads /proc")
    assert status.stat().st_size == 0
    assert read_bytes(status, 1 << 20).startswith(b"Name:")
    assert len(read_bytes(status, 20)) == 20
