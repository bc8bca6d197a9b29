"""Sweeps: the same results whatever the runner, nothing run twice, nothing lost to a failure, a kill or Ctrl-C."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import stand_ins
from stand_ins import cell

from poem import zoo
from poem.bench.load_cell import Machine
from poem.bench.runners import CellEnded, CellProgress, CellStarted, Event, Inline, Ray, Runner, Workers
from poem.bench.store import Store
from poem.bench.sweep import FAILURES_BEFORE_WARNING, CannotWriteError, SweepPlanned, group_cells, sweep

REAL = [cell("tent", lr=0.005), cell("source"), cell("source", data="no-such-data")]
"""Two cells that can be measured, and one that cannot."""


def identities(store: Store) -> dict[str, object]:
    return {report.key: report.identity() for report in store.results()}


def files(store: Store) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in store.cells.rglob("*-*.json")}


def test_runners_agree_and_a_cell_that_raises_does_not_stop_the_others(tmp_path: Path) -> None:
    alone, pool = Store(tmp_path / "alone"), Store(tmp_path / "pool")
    for store, runner in ((alone, Inline()), (pool, Workers(count=2))):
        outcome = sweep(REAL, store, runner=runner)
        assert {each.key for each in outcome.done} == {each.key for each in REAL[:2]}
        assert outcome.failed == (REAL[2],)
        assert outcome.code == 1
        failure = store.failures()[REAL[2].key]
        assert "Traceback" in failure.error
        assert "unknown data set 'no-such-data'" in failure.reason
    assert len(identities(alone)) == 2
    assert identities(alone) == identities(pool)


def test_what_is_finished_is_not_run_again_and_what_failed_is(tmp_path: Path) -> None:
    store, runner = Store(tmp_path), Inline(measure=stand_ins.PATH)
    cells = [cell(seed=0), cell(seed=1), cell("raises"), cell(seed=0)]
    events: list[SweepPlanned | Event] = []
    first = sweep(cells, store, runner=runner, on_event=events.append)
    assert (len(first.done), len(first.failed), len(first.left)) == (2, 1, 0), "a cell that comes twice is run once"
    assert isinstance(events[0], SweepPlanned)
    assert [type(each) for each in events[1:4]] == [CellStarted, CellProgress, CellEnded]
    before = files(store)
    second = sweep(cells, store, runner=runner)
    assert [len(each) for each in (second.done, second.skipped, second.failed)] == [0, 2, 1]
    after = files(store)
    assert all(after[name] == was for name, was in before.items() if "failed" not in name)
    assert str(second).endswith("2 finished before, 1 failed")


def test_a_sweep_whose_first_cells_all_fail_alike_says_so_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    doomed = [cell("raises", seed=seed) for seed in range(FAILURES_BEFORE_WARNING + 5)]
    told: list[int] = []

    def watch(event: SweepPlanned | Event) -> None:
        told.append(len(caplog.messages))

    outcome = sweep(doomed, Store(tmp_path / "a"), runner=Inline(measure=stand_ins.PATH), on_event=watch)
    assert len(outcome.failed) == len(doomed), "it goes on"
    assert caplog.messages == [
        f"the first {FAILURES_BEFORE_WARNING} cells all failed with: RuntimeError: no such luck; Ctrl-C to stop"
    ]
    assert told.index(1) == 3 * FAILURES_BEFORE_WARNING, "at the twentieth, not at the end"
    caplog.clear()
    sweep([cell(), *doomed], Store(tmp_path / "b"), runner=Inline(measure=stand_ins.PATH))
    assert caplog.messages == [], "one was measured"


def test_cells_measured_with_other_weights_are_run_again(tmp_path: Path) -> None:
    store, runner = Store(tmp_path), Inline(measure=stand_ins.PATH)
    now = zoo.sha256(zoo.find_weights(zoo.base("digits-ln")))
    cells = [cell(seed=seed) for seed in range(3)]
    for each, digest in zip(cells, (now, "ab" * 32, None), strict=True):
        store.save(replace(stand_ins.report(each), base={} if digest is None else {"sha256": digest}))
    outcome = sweep(cells, store, runner=runner)
    assert (outcome.skipped, outcome.done) == ((cells[0],), tuple(cells[1:])), "those of other or unknown weights"
    assert len(list(store.results())) == 5, "the former results stay"
    assert sweep(cells, store, runner=runner).skipped == tuple(cells)


def test_on_a_cluster_results_of_any_weights_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node has weights of its own, which the machine that asks does not know."""
    monkeypatch.setattr(Ray, "run", lambda *_: pytest.fail("nothing is left to run"))
    store = Store(tmp_path)
    store.save(replace(stand_ins.report(cell()), base={"sha256": "ab" * 32}))
    assert sweep([cell()], store, runner=Ray(address="auto")).skipped == (cell(),)


def test_a_result_says_how_many_processes_shared_the_machine(tmp_path: Path) -> None:
    runners: tuple[Runner, ...] = (Inline(measure=stand_ins.PATH), Workers(count=2, measure=stand_ins.PATH))
    for count, runner in enumerate(runners, start=1):
        store = Store(tmp_path / str(count))
        sweep([cell(seed=seed) for seed in range(3)], store, runner=runner)
        assert [report.host["processes"] for report in store.results()] == [count] * 3


def test_cells_with_the_same_model_and_data_come_together() -> None:
    cells = [cell(method, seed, base=base) for method in ("tent", "sar") for base in ("a", "b") for seed in (0, 1)]
    ordered = group_cells(cells)
    assert sorted(each.key for each in ordered) == sorted(each.key for each in cells)
    assert [(each.base, each.seed) for each in ordered] == [
        (base, seed) for base in "ab" for seed in (0, 1) for _ in range(2)
    ]


def test_a_killed_worker_costs_one_more_try(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    runner = Workers(machine=Machine(root=str(scratch)), count=2, retries=1, measure=stand_ins.PATH)
    cells = [cell("kills-once"), cell("kills-always", n=65), *(cell(seed=seed) for seed in range(4))]
    store = Store(tmp_path / "out")
    outcome = sweep(cells, store, runner=runner)
    assert (scratch / "killed").exists(), "it was killed"
    assert {each.key for each in outcome.done} == {each.key for each in cells if each.method != "kills-always"}
    assert [each.method for each in outcome.failed] == ["kills-always"]
    assert store.failures()[cells[1].key].reason == (
        "its worker process was killed by signal 9, at each of 2 tries (out of memory?)"
    )


def test_workers_that_cannot_start_are_an_error_and_not_a_failure_of_every_cell(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ChildProcessError, match="do not start: the last one ended with exit code 1"):
        sweep([cell(), cell(seed=1)], store, runner=Workers(count=1, retries=0, measure="no_such_module:measure"))
    assert store.failures() == {}


DRIVER = """
import sys
from poem.bench.load_cell import Machine
from poem.bench.runners import Inline, Workers
from poem.bench.store import Store
from poem.bench.sweep import sweep
from stand_ins import cell
if __name__ == "__main__":
    scratch, out, kind = sys.argv[1:]
    machine = Machine(root=scratch)
    runner = Inline(machine=machine, measure="stand_ins:measure")
    if kind == "workers":
        runner = Workers(machine=machine, count=1, measure="stand_ins:measure")
    outcome = sweep([cell(), cell("waits"), cell("waits", seed=1), cell(seed=2)], Store(out), runner=runner)
    print(outcome)
    sys.exit(outcome.code)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def waiting(scratch: Path) -> Sequence[int]:
    """Process ids of workers that are in the middle of a cell."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = [int(path.name.split("-")[1]) for path in scratch.glob("waiting-*")]
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("no worker came to wait")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux who is alive")
@pytest.mark.parametrize(("kind", "number"), [("inline", signal.SIGTERM), ("workers", signal.SIGINT)])
def test_a_signal_ends_with_a_summary_and_a_kill_with_no_orphans(
    tmp_path: Path, kind: str, number: signal.Signals
) -> None:
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    (tmp_path / "driver.py").write_text(DRIVER)
    words = [sys.executable, str(tmp_path / "driver.py"), str(scratch), str(out), kind]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
    }
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    workers = waiting(scratch)
    os.killpg(process.pid, number)  # as a terminal does: to all of them
    said, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "stopped with" in said
    assert "Traceback" not in errors
    assert not any(alive(pid) for pid in workers)
    store = Store(out)
    assert not [path for path in out.rglob(".*") if path.name != ".lock"]
    if kind == "inline":
        assert len(list(store.results())) == 1
        assert "1 cells measured" in said
        assert "stopped with 3 left" in said
        return
    for path in scratch.glob("waiting-*"):
        path.unlink()
    again = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    workers = waiting(scratch)
    again.kill()
    again.wait()
    until = time.monotonic() + 20
    while any(alive(pid) for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in workers), "workers end with the process that started them"


def test_two_sweeps_on_one_folder_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    store = Store(tmp_path)
    with store.lock(), pytest.raises(BlockingIOError, match=f"in use by process {os.getpid()} on"):
        sweep([cell()], Store(tmp_path), runner=Inline(measure=stand_ins.PATH))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk that is soon full: a real one where we may mount it, else one that refuses the sixth file."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    mounted = shutil.which("mount") and subprocess.run(words, capture_output=True, check=False).returncode == 0
    if not mounted:
        calls = itertools.count()

        def refuse(number: int) -> None:
            if next(calls) >= 5:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("poem._util.files.os.fsync", refuse)
    yield folder
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("kind", [Inline, Workers])
def test_no_space_stops_the_sweep_and_keeps_what_was_saved(disk: Path, kind: type[Inline] | type[Workers]) -> None:
    store = Store(disk / "out")
    with pytest.raises(
        CannotWriteError, match=r"cannot write to .*: No space left on device; the \d+ results .* are kept"
    ):
        sweep([cell(seed=seed) for seed in range(64)], store, runner=kind(measure=stand_ins.PATH))
    kept = list(store.results())
    assert 0 < len(kept) < 64
    assert store.broken == {}
    assert len(kept) == sum(1 for path in store.cells.rglob("*") if path.is_file()), "nothing half-written"


def test_a_missing_ray_names_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'poem-tta\[ray\]'"):
        sweep([cell()], Store(tmp_path), runner=Ray())


class JoinedRay:
    """A Ray that the caller has joined, whose tasks never end."""

    def __init__(self) -> None:
        self.asked, self.cancelled = 0, list[object]()

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, object]]:
        return [{"Alive": True, "Resources": {"CPU": 4}}]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4}

    def remote(self, *arguments: object) -> JoinedRay | str:
        if callable(arguments[0]):
            return self
        self.asked += 1
        return f"task {self.asked}"

    def options(self, **settings: object) -> JoinedRay:
        return self

    def wait(self, pending: list[object], **settings: object) -> None:
        raise KeyboardInterrupt

    def cancel(self, reference: object, force: bool) -> None:
        self.cancelled.append(reference)


def test_ctrl_c_cancels_the_tasks_of_a_cluster_that_stays_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = JoinedRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    outcome = sweep([cell(seed=seed) for seed in range(3)], Store(tmp_path), runner=Ray())
    assert outcome.interrupted
    assert ray.cancelled == ["task 1", "task 2", "task 3"]


@pytest.mark.slow
def test_ray_agrees_with_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    alone, cluster = Store(tmp_path / "alone"), Store(tmp_path / "ray")
    sweep(REAL, alone)
    before = signal.getsignal(signal.SIGTERM)
    outcome = sweep(REAL, cluster, runner=Ray(cpus=2))
    assert signal.getsignal(signal.SIGTERM) == before
    assert len(outcome.done) == 2
    assert outcome.failed == (REAL[2],)
    assert "unknown data set" in cluster.failures()[REAL[2].key].reason
    assert identities(alone) == identities(cluster)
