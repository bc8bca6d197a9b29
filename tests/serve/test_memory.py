"""What a service holds is bounded: kept answers, locks, shapes, and pages of freed memory."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from served import engine, pictures, served

from poem.serve import engine as engine_module
from poem.serve.learner import Learner, Served, answer_stacked
from poem.serve.leases import Leases
from poem.serve.ledger import Ledger
from poem.serve.stack import MOST_SHAPES, Stack


def reply(images: int) -> dict[str, object]:
    answer = {"label": 3, "name": "three", "probability": 0.98765, "entropy": 0.1234, "answered_by": "mean"}
    return {"stream": "a", "batch": 0, "answers": [answer] * images}


def test_answers_under_keys_are_bounded_in_bytes() -> None:
    ledger = Ledger(most=1000, expiry_s=1e9, most_bytes=20_000)
    for at in range(200):
        assert ledger.claim(str(at), "p", at) is None
        ledger.complete(str(at), reply(8), at)
        assert ledger.size <= 20_000
    assert 10 < len(ledger) < 50
    assert ledger.claim("199", "p", 200) == reply(8), "an answer comes back as it was"
    assert ledger.claim("0", "p", 200) is None, "the oldest were dropped"
    restored = Ledger(most=1000, expiry_s=1e9, most_bytes=20_000)
    restored.load_plain(json.loads(json.dumps(ledger.to_plain())))
    assert restored.claim("199", "p", 200) == reply(8)


def test_an_answer_larger_than_the_bound_is_kept_until_the_next() -> None:
    ledger = Ledger(most=10, expiry_s=1e9, most_bytes=100)
    for key in "ab":
        ledger.claim(key, "p", 0)
        ledger.complete(key, reply(8), 0)
    assert ledger.claim("b", "p", 0) == reply(8)
    assert len(ledger) == 1


def test_malformed_kept_keys_are_left_out() -> None:
    ledger = Ledger(most=10, expiry_s=10)
    ledger.load_plain([["x", "p", {"at": 1}, None], ["y", "p", {"at": 1}, "soon"], ["z", "p", {"at": 1}, 1.0]])
    ledger.load_plain([["u", "p", "[1]", 1.0], ["v", "p", "{", 1.0], ["w", "p", '{"at": 2}', 1.0]])
    assert len(ledger) == 2
    assert (ledger.claim("z", "p", 2), ledger.claim("w", "p", 2)) == ({"at": 1}, {"at": 2})


def test_locks_of_streams_are_gone_after_they_were_taken(tmp_path: Path) -> None:
    leases = Leases(tmp_path, "me")
    try:
        for at in range(20):
            assert leases.take(tmp_path / f"stream{at}") == 1
        assert len(leases._locks) == 0
    finally:
        leases.close()


def test_shapes_for_which_stacking_was_tried_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack.__new__(Stack)
    tried: list[tuple[int, ...]] = []
    stack._why, stack._tried = "", {}
    stack.recipe = SimpleNamespace(recover=SimpleNamespace(due=lambda calls: False))  # type: ignore[assignment]

    def tried_on(self: Stack, shape: tuple[int, ...]) -> str:
        tried.append(shape)
        return ""

    monkeypatch.setattr(Stack, "_tried_on", tried_on)
    member = SimpleNamespace(newer=True, rest={"calls": 1, "image": None})
    for side in range(8, 8 + 2 * MOST_SHAPES):
        for _ in range(2):
            assert stack.why_not(member, pictures(1, 0)[:, :, :1, :1].expand(1, 3, side, side)) == ""  # type: ignore[arg-type]
    assert len(tried) == 2 * MOST_SHAPES, "each shape is tried once while it is remembered"
    assert len(stack._tried) == MOST_SHAPES


def test_a_stacked_stream_holds_its_state_once() -> None:
    plain = served("tent")
    fast = Served(**{**vars(plain), "settings": {**plain.settings, "lr": 0.01}})
    stack = Stack(Learner(fast, 2).adapter)
    learners, alone = [Learner(fast, 2, stack=stack) for _ in range(2)], Learner(fast, 2)
    for each in (*learners, alone):
        each.answer(pictures(2, 0))
    assert adapted(learners[0]), "after a batch that was computed alone its adapter has the state"
    before = alone.state_dict()["tensors"]
    for seed in (1, 2):
        assert [each.why_not_stacked(pictures(2, seed)) for each in learners] == ["", ""]
        answer_stacked(stack, learners, [pictures(2, seed)] * 2)
        alone.answer(pictures(2, seed))
        assert not any(map(adapted, learners)), "the stack has the newer row"
    held, expected = (each.state_dict()["tensors"] for each in (learners[0], alone))
    assert held.keys() == expected.keys()
    assert all(torch.allclose(held[name], expected[name], atol=1e-3) for name in held)
    moved = [name for name in before if before[name].shape == held[name].shape]
    assert max(float((held[name] - before[name]).abs().max()) for name in moved) > 1e-2, "ten times what is allowed"
    assert adapted(learners[0])


def adapted(learner: Learner) -> int:
    """Bytes of what the stream's adapter has adapted and remembers."""
    values = learner._plain.checkpoint().state.values
    groups = [values["moving"], values["memory"], *values["steps"].values()]
    return sum(tensor.nbytes for group in groups for tensor in group.values())


def test_freed_memory_is_returned_after_work_and_not_while_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[float] = []
    monkeypatch.setattr(engine_module, "TRIM_S", 0.2)
    with engine(tmp_path, batch_size=4) as made:
        # The engine's own reading of the clock, however late its thread then comes.
        monkeypatch.setattr(engine_module, "return_freed_memory", lambda: returned.append(made._trimmed))
        for seed in range(3):
            made.submit("a", pictures(2, seed)).result(60)
        until = time.monotonic() + 20
        while not returned and time.monotonic() < until:
            time.sleep(0.05)
        assert returned
        time.sleep(2.5)
        assert len(returned) <= 4, "once for the work, not again and again"
        assert all(later - one >= 0.2 for one, later in itertools.pairwise(returned))


FRAGMENTS = """
import re, torch
from poem._util.malloc import keep_freed_memory, return_freed_memory
def mib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
assert keep_freed_memory()
blocks = [torch.zeros(16_000) for _ in range(2000)]
held = blocks[::10]
full = mib()
del blocks
kept = mib()
assert return_freed_memory()
print(full, kept, mib())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="an allocator of glibc")
def test_freed_pages_between_held_blocks_go_back_to_the_system() -> None:
    said = subprocess.run([sys.executable, "-c", FRAGMENTS], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    full, kept, after = map(float, said.stdout.split())
    assert full - kept < 10, "glibc keeps what was freed"
    assert kept - after > 80, "of 122 MiB, 110 were freed between blocks that are held"


THREADS = """
import ctypes, re, sys, threading
from poem._util.malloc import keep_freed_memory, return_freed_memory, use_one_arena
libc, size = ctypes.CDLL(None), 40 << 20
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def mib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
def work():
    said.append(mib())
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    said.append(mib())
    libc.free(block)
    return_freed_memory()
    said.append(mib())
said = []
def run(*_, **__):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    print(*said)
if sys.argv[1] == "serve":
    import uvicorn
    from poem.cli.main import main
    uvicorn.Server.run = run
    sys.exit(main(["serve", "digits-bn", "--port", "0", "--threads", "1", "--state", sys.argv[2]]))
assert keep_freed_memory()
if sys.argv[1] == "one":
    assert use_one_arena()
run()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="an allocator of glibc")
@pytest.mark.parametrize("how", ["own", "one", "serve"])
def test_memory_that_a_thread_has_freed_goes_back_to_the_system_from_one_arena(how: str, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-c", THREADS, how, str(tmp_path / "state")]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    before, full, after = map(float, said.stdout.splitlines()[-1].split())
    assert full - before > 35, "the thread's block takes 40 MiB"
    if how == "own":
        assert after - before > 35, "an arena of the thread's own keeps its top"
    else:
        assert after - before < 5


SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "serve_soak.py"
with_soak = pytest.mark.skipif(not SOAK.is_file(), reason="a copy without benchmarks")


def soak_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve_soak", SOAK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(*mib: float, requests: int = 100_000) -> list[tuple[float, int, int]]:
    return [(minute, int(each * 1024), requests) for minute, each in enumerate(mib, 1)]


@with_soak
def test_the_soak_tells_flat_memory_from_memory_that_grows() -> None:
    soak = soak_module()
    noise = [(7919 * at) % 13 / 13 - 0.5 for at in range(60)]
    assert soak.judged(rows(*(700 + each for each in noise)), 15)["memory"] == "flat"
    grown = soak.judged(rows(*(700 + at * 0.6 + each for at, each in enumerate(noise))), 15)
    assert grown["memory"] == "grows"
    assert grown["slope_mib_per_hour"] == pytest.approx(36, abs=1)
    short = soak.judged(rows(700, 701, 699, 704, 698, 703, 697), 2)
    assert short["memory"].startswith("not decided")
    steps = soak.judged(rows(*(700 + 8 * (at // 10) for at in range(60))), 15)
    assert steps["memory"] == "grows", "growth in steps is growth"


@with_soak
def test_the_soak_waits_until_every_ledger_is_full() -> None:
    soak = soak_module()
    filling = [(minute, 700 * 1024, 200 * minute) for minute in range(1, 61)]
    assert soak.judged(filling, 5)["line_from_minute"] == pytest.approx(soak.FILLED / 200, abs=1)
    slow = [(minute, kib + 1024 * minute, minute) for minute, kib, _ in filling]
    found = soak.judged(slow, 5)
    assert found["line_from_minute"] == 30
    assert "still filling" in found["memory"], "growth while ledgers fill is no leak"
