"""Results in a folder: whole files, names for any file system, one writer, and nothing overwritten unseen."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stand_ins import cell, report

import poem._util.files
from poem._util.files import write_atomic
from poem.bench.cell import Cell
from poem.bench.result import latest
from poem.bench.store import Store, safe_name
from poem.parts import EntropyBelow
from poem.recipes import methods as method
from poem.recipes.recipe import Recipe


def file_of(store: Store, of: Cell) -> Path:
    """The file of a cell's result."""
    return store.path(of, report(of).key)


def test_a_result_is_found_again_by_its_cell(tmp_path: Path) -> None:
    store = Store(tmp_path)
    mine = cell("deyo+poem", seed=3)
    assert store.finished(mine) is None
    path = store.save(report(mine, 71.0))
    assert path.relative_to(tmp_path).as_posix() == (
        f"cells/digits-ln/deyo+poem/single-fog-s3-{report(mine).key}.json"
    ), "people can read it"
    assert report(mine).key.startswith(f"{mine.key}-")
    found = Store(tmp_path).finished(mine)
    assert found is not None
    assert found == report(mine, 71.0)
    assert store.finished(replace(mine, version=2)) is None, "a changed suite is another cell"
    assert [each.cell_key for each in store.results()] == [mine.key]


def test_names_are_safe_on_any_file_system(tmp_path: Path) -> None:
    assert safe_name("tent*") == "tent-twice"
    assert safe_name('a/b\\c:d?"<>| ') == "a_b_c_d______"
    assert safe_name("..") == "_"
    many = cell("tent*", corruptions=["fog", "snow"], scenario="continual")
    assert "continual-2-shifts-s0-" in Store(tmp_path).path(many, many.key).name


def test_the_first_result_of_a_cell_stays(tmp_path: Path) -> None:
    store, mine = Store(tmp_path), cell()
    path = store.save(report(mine, 10.0))
    before = path.read_bytes(), path.stat().st_mtime_ns
    store.save(report(mine, 20.0))
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


@pytest.mark.parametrize("text", ["", '{"schema": 1, "cel', "[]", '{"schema": 99}', '{"schema": 1}'])
def test_what_is_no_result_is_named_and_moved_aside(tmp_path: Path, text: str) -> None:
    store, mine = Store(tmp_path), cell()
    path = file_of(store, mine)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert store.finished(mine) is None
    assert list(store.results()) == []
    assert path.name in store.broken[path]
    assert path.read_text() == text, "asking changes nothing"
    store.save(report(mine))
    assert store.finished(mine) == report(mine)
    assert path.with_name(path.name + ".broken").read_text() == text
    path.write_text("broken again")
    store.save(report(mine))
    assert path.with_name(path.name + ".broken").read_text() == text, "nor is what was moved aside overwritten"
    assert len(list(store.results())) == 1


def test_a_result_under_another_cells_name_does_not_count(tmp_path: Path) -> None:
    store, mine, other = Store(tmp_path), cell(seed=1), cell(seed=2)
    store.save(report(other)).rename(file_of(store, mine))
    assert store.finished(mine) is None
    assert "another cell" in store.broken[file_of(store, mine)]


def test_a_result_of_another_recipe_stays_beside_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, before = Store(tmp_path), report(cell("tent"))
    old = store.save(before)
    monkeypatch.setitem(method.METHODS, "tent", lambda: Recipe(select=EntropyBelow(0.3)))
    assert store.finished(cell("tent")) is None, "the recipe has changed since"
    new = store.save(report(cell("tent"), 60.0))
    assert new != old
    assert store.save(before) == old
    assert sorted(each.metrics["top1"] for each in store.results()) == [50.0, 60.0]
    assert store.broken == {}


def test_a_result_of_an_older_version_does_not_count_as_finished_and_can_be_read(tmp_path: Path) -> None:
    """Its key and its file's name lack the weights."""
    store, mine = Store(tmp_path), cell("tent")
    path = store.save(report(mine))
    values = json.loads(path.read_text())
    path.unlink()
    values["key"] = mine.key
    del values["checksum"]
    store.path(mine, mine.key).write_text(json.dumps(values))
    assert store.finished(mine) is None
    assert list(store.results()) == [report(mine)]
    assert [each.key for each in store.results()] == [report(mine).key], "so that it is compared with a new one"
    store.save(replace(report(mine, 60.0), host={"started": "2025-01-01"}))
    assert store.finished(mine) == replace(report(mine, 60.0), host={"started": "2025-01-01"})
    found = latest(store.results(), lambda result: result.cell_key)
    assert found[mine.key].metrics["top1"] == 60.0, "pages show the one measured last"
    assert store.broken == {}


def test_a_cell_without_a_recipe_can_fail(tmp_path: Path) -> None:
    store, odd = Store(tmp_path), cell("no-such-method")
    store.save_failure(odd, "ValueError: unknown method")
    assert list(store.failures()) == [odd.key]


def test_a_failure_is_kept_until_the_cell_succeeds(tmp_path: Path) -> None:
    store, mine = Store(tmp_path), cell()
    store.save_failure(mine, "Traceback ...\nValueError: too odd\n")
    assert store.finished(mine) is None
    assert list(store.results()) == []
    failure = store.failures()[mine.key]
    assert (failure.cell, failure.reason) == (mine, "ValueError: too odd")
    store.save(report(mine))
    assert store.failures() == {}
    old = store.save_failure(mine, "x")
    old.rename(old.with_name(old.name.replace(mine.key, "0" * 16)))
    assert store.failures() == {}, "another recipe's failure"
    half = store.save_failure(cell(seed=5), "x")
    half.write_text(half.read_text()[:20])
    assert store.failures() == {}
    assert half in store.broken


HOLD = """
import sys, time
from poem.bench.store import Store
with Store(sys.argv[1]).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_writer_is_refused_and_a_killed_one_releases_the_lock(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    store = Store(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError, match=rf"is in use by process {holder.pid} on .*; wait"), store.lock():
            pass
    finally:
        holder.kill()
        holder.wait()
    path = file_of(store, cell())
    left = path.with_name(f".{path.name}.{holder.pid}")
    left.parent.mkdir(parents=True)
    left.write_text("half")
    with store.lock():
        assert not left.exists(), "what the killed one left half-written is gone"
        record = json.loads((tmp_path / ".lock").read_text())
        assert record["pid"] == os.getpid()
    with store.lock():
        pass


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "file"
    write_atomic(path, "before é")
    write_atomic(path, b"after", temp_folder=tmp_path / "part", sync=False)
    assert path.read_bytes() == b"after"

    def broken(self: Path, place: Path) -> Path:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "replace", broken)
    for beside in (None, tmp_path / "part"):
        with pytest.raises(OSError, match="Input/output"):
            write_atomic(path, "never", temp_folder=beside)
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path]
    assert path.read_bytes() == b"after"


def test_no_space_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.save(report(cell(seed=1)))

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(poem._util.files.os, "fsync", full)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="No space left"):
        store.save(report(cell(seed=2)))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in files] == [file_of(store, cell(seed=1)).name]


def test_suites_and_flags_of_sweeps_are_kept_with_copies_of_suite_files(tmp_path: Path) -> None:
    store, mine = Store(tmp_path / "out"), tmp_path / "my suite.yaml"
    assert store.requests() == []
    mine.write_text("name: mine")
    store.save_request(["table1", str(mine)], "tiny", {"limit": 64, "methods": None, "changes": {"severity": "3"}})
    store.save_request(["table1"], "tiny", {})
    store.save_request([str(mine)], "tiny", {"limit": 64, "changes": {"severity": "3"}})
    mine.unlink()
    first, second, third = store.requests()
    assert (first.suite, first.settings) == ("table1", {"limit": 64, "changes": {"severity": "3"}})
    assert (second.suite, second.settings) == ("table1", {})
    assert Path(third.suite).read_text() == "name: mine", "asked for twice, kept once, the latest last"
    assert third.suite == str(tmp_path / "out" / "suites" / "my_suite.yaml")
    (store.folder / "asked.json").write_text("[{")
    assert store.requests() == []
    assert any("does not say what was asked for" in words for words in store.broken.values())
