"""The audit file: readable lines, private, never overwritten, and no reason to stop where the disk is full."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import batch, learner

from poem.guarded.audit import AUDIT_SCHEMA, PIECE, Audit, Event, lines_after, read_audit, tensor_hash
from poem.guarded.guard import guard_adapter as guard

FULL = Path("/dev/full")
posix = pytest.mark.skipif(os.name != "posix", reason="modes and limits of POSIX")
with_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def fill_up(audit: Audit) -> None:
    """As if the disk were full from now on."""
    full = os.open(FULL, os.O_WRONLY)
    os.dup2(full, audit._file.fileno())
    os.close(full)


def test_a_file_has_a_header_and_then_its_lines(path: Path) -> None:
    audit = Audit(path, {"method": "tent"})
    lines: list[dict[str, Any]] = [
        {"kind": "batch", "batch": 0, "signals": {"drift": 0.5}},
        {"kind": "event", "of": [1]},
    ]
    assert [audit.write(line) for line in lines] == [None, None]
    assert read_audit(path) == ({"kind": "header", "schema": AUDIT_SCHEMA, "method": "tent"}, lines)  # before it closes
    audit.close()
    assert path.read_text().count("\n") == 3


def test_lines_are_json_with_the_names_of_numbers_that_json_lacks(path: Path) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    audit = Audit(path, {"mean": (0.5, math.nan)})
    audit.write(
        {"kind": "batch", "deep": {"of": [math.inf, {"a": -math.inf}], 3: None}, "text": "line\nend\u2028é", "ok": True}
    )
    audit.close()
    header, line = (json.loads(text, parse_constant=refuse) for text in path.read_text().split("\n")[:2])
    assert header["mean"] == [0.5, "nan"]
    assert line == {
        "kind": "batch",
        "deep": {"of": ["inf", {"a": "-inf"}], "3": None},
        "text": "line\nend\u2028é",
        "ok": True,
    }
    assert read_audit(path) == (header, [line])


@posix
@pytest.mark.parametrize("there", [False, True])
def test_the_owner_alone_may_read_it(path: Path, there: bool) -> None:
    if there:
        path.touch()
        path.chmod(0o644)
    before = os.umask(0)
    try:
        Audit(path, {}).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_with_content_is_refused_and_kept(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"expected a new file for the audit, got .*, which has content; name"):
        Audit(path, {})
    assert path.read_text() == "mine"


def test_a_line_that_was_cut_is_left_out(path: Path) -> None:
    audit = Audit(path, {})
    for number in range(3):
        audit.write({"kind": "batch", "batch": number})
    audit.close()
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for end in range(last, len(whole) - 1):  # up to the one before the closing brace
        path.write_bytes(whole[:end])
        assert [line["batch"] for line in read_audit(path)[1]] == [0, 1]
    path.write_bytes(whole[:-1])
    assert len(read_audit(path)[1]) == 3


@pytest.mark.parametrize("cut", [b"", b'{"kind":"ba', b"x" * (3 * PIECE)])
def test_a_run_goes_on_without_reading_what_it_has_written(
    path: Path, cut: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = Audit(path, {"method": "tent"})
    for number in range(2000):
        audit.write({"kind": "batch", "batch": number, "text": "x" * 100})
    assert audit.size == path.stat().st_size > 3 * PIECE
    audit.close()
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes() + cut)
    read: list[int] = []
    own = json.loads

    def counted(text: bytes) -> Any:
        read.append(len(text))
        return own(text)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", None)
        patch.setattr("poem.guarded.audit.json.loads", counted)
        Audit(path, {"method": "tent"}, append=True).close()
        with pytest.raises(ValueError, match="other method"):
            Audit(path, {"method": "sar"}, append=True)
    assert max(read) < 1000
    assert len(read) < 10, "the header alone is parsed"
    assert path.stat().st_size == whole, "a line that was cut is dropped"
    assert lines_after(path, whole) == []


def test_lines_from_a_place_on(path: Path) -> None:
    audit = Audit(path, {})
    audit.write({"kind": "batch", "batch": 0})
    assert audit.size is not None
    place = audit.size
    audit.write({"kind": "batch", "batch": 1})
    audit.close()
    assert audit.size is None
    path.write_bytes(path.read_bytes() + b'{"kind"')
    assert [line["batch"] for line in lines_after(path, place)] == [1]
    with pytest.raises(ValueError, match="written by a guard"):
        lines_after(path, place - 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "which has no header"),
        ('{"kind":"hea', "line 1"),
        ('{"kind":"batch"}\n', "which has no header"),
        ("[1, 2]\n", "whose line 1 is no object"),
        ('{"kind":"header","schema":1}\n3\n', "whose line 2 is no object"),
        ('{"kind":"header","schema":1}\n{"kind"\n{"kind":"batch"}\n', "line 2"),
        ('{"kind":"header","schema":99}\n', "expected an audit of schema 1, got 99"),
        ("\x00\x01", "line 1"),
    ],
)
def test_what_no_guard_wrote_is_refused(path: Path, content: str, message: str) -> None:
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_audit(path)
    assert str(path) in str(caught.value)


@with_full
def test_a_full_disk_is_told_once_and_the_run_goes_on(path: Path) -> None:
    audit = Audit(path, {})
    fill_up(audit)
    told = [audit.write({"kind": "batch", "batch": number}) for number in range(3)]
    assert "No space left" in str(told[0])
    assert told[1:] == [None, None]
    assert audit.lost
    audit.close()
    assert read_audit(path)[1] == []


@with_full
def test_a_guard_goes_on_where_the_disk_is_full(path: Path) -> None:
    written, plain = guard(learner("gn"), audit=path), guard(learner("gn"))
    for seed in range(4):
        if seed == 1:
            assert isinstance(written._told.audit, Audit)
            fill_up(written._told.audit)
        assert torch.equal(written(batch(seed=seed)), plain(batch(seed=seed)))
    lost = [event for event in written.events if event.kind == "audit lost"]
    assert len(lost) == 1
    assert "No space left" in lost[0].why
    assert [line["batch"] for line in read_audit(path)[1] if line["kind"] == "batch"] == [0]
    written.unload()


@with_full
def test_no_room_for_the_header_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, opened, changed = os.open, list[int](), list[int]()

    def full(name: object, flags: int, *mode: int) -> int:
        opened.append(own(FULL, os.O_WRONLY))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr("poem.guarded.audit.os.open", full)
        patch.setattr(
            "poem.guarded.audit.os.fchmod", lambda handle, mode: changed.append(mode)
        )  # never a real device's
        with pytest.raises(OSError, match=r"expected a place for the audit, got .*No space left.*; name another"):
            Audit(path, {})
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])  # it was closed
    assert not changed  # a device keeps its mode


@posix
def test_a_line_that_only_begins_to_fit_is_the_last_one(path: Path) -> None:
    """The first write takes what fits and raises nothing."""
    import resource

    audit = Audit(path, {})
    audit.write({"kind": "batch", "batch": 0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, hard))
    try:
        told = audit.write({"kind": "batch", "batch": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert told is not None
    assert audit.write({"kind": "batch", "batch": 2}) is None
    audit.close()
    assert path.read_bytes().endswith(b'\n{"kind":"')
    assert read_audit(path)[1] == [{"kind": "batch", "batch": 0}]


def test_an_event_reads_as_a_sentence() -> None:
    assert str(Event(3, "alarm", "it shifted")) == "batch 3: alarm: it shifted"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_a_hash_depends_on_values_type_and_shape(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype)
    found = tensor_hash(tensor)
    assert len(found) == 16
    assert found == tensor_hash(tensor.clone())
    assert found == tensor_hash(tensor.T.contiguous().T)  # other strides, the same values
    changed = tensor.clone()
    changed[1, 2] = 0
    others = [changed, tensor.reshape(3, 2), tensor.flatten(), tensor.T, tensor[:, :2], tensor[None]]
    assert len({found, *map(tensor_hash, others)}) == len(others) + 1


def test_a_hash_tells_types_apart_whose_bytes_are_the_same() -> None:
    zeros = [torch.zeros(4, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.float16, torch.int16)]
    shapes = [torch.zeros(0), torch.zeros(0, 3), torch.zeros(()), torch.zeros(1)]
    assert len(set(map(tensor_hash, [*zeros, *shapes]))) == 8
    learnt = torch.ones(2, requires_grad=True)
    assert tensor_hash(learnt) == tensor_hash(learnt.detach())
