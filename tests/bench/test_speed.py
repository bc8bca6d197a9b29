"""The speed benchmark runs and says what it says; its plain opponent computes what POEM computes."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from nets import make_net

import poem
from poem.parts import Explore, Repeat

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _script(name: str) -> ModuleType:
    """A file of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


plain = _script("_plain")


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    pytest.importorskip("torchvision")
    return _script("speed")


def _images(batches: int = 6, count: int = 16) -> torch.Tensor:
    return torch.rand(batches, count, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("kind", "sharpness"), [("bn", 10.0), ("gn", 6.0), ("ln", 9.0)])
@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        ({"rounds": 1}, {"rounds": 1}),
        ({"threshold": 9.0, "explore": Repeat(2)}, {"threshold": 9.0, "repeat": True}),
        ({}, {"separate": True}),
    ],
    ids=["explore", "one update", "everyone twice", "separate forwards"],
)
def test_plain_poem_answers_as_ours(
    kind: str, sharpness: float, changes: dict[str, Any], settings: dict[str, Any]
) -> None:
    net = make_net(kind, sharpness=sharpness)
    ours = poem.adapt(copy.deepcopy(net), "poem", lr=0.02, **changes)
    theirs = plain.PlainPoem(copy.deepcopy(net), lr=0.02, **settings)
    updates = []
    for batch in _images():
        torch.testing.assert_close(theirs(batch), ours(batch), atol=1e-4, rtol=0)
        assert theirs.updates == ours.last.updates
        updates.append(theirs.updates)
    if not changes:
        assert set(updates) == {1, 2}, "some sets changed after an update, and some stood still"
    assert sum(updates) > 0


@pytest.mark.parametrize(("kind", "sharpness"), [("bn", 10.0), ("ln", 9.0)])
def test_plain_tent_answers_as_ours(kind: str, sharpness: float) -> None:
    net = make_net(kind, sharpness=sharpness)
    ours, theirs = poem.adapt(copy.deepcopy(net), "tent", lr=0.02), plain.PlainTent(copy.deepcopy(net), lr=0.02)
    answers = [(theirs(batch), ours(batch)) for batch in _images()]
    for mine, other in answers:
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)
    assert (answers[-1][0] - net(_images()[-1])).abs().max() > 1e-3


def test_a_network_of_another_build_has_no_plain_opponent() -> None:
    with pytest.raises(ValueError, match="expected a ResNet or a ViT"):
        plain.deep_part(torch.nn.Sequential(torch.nn.Linear(2, 2)))


@pytest.mark.parametrize(("share", "first"), [(1.0, [0, 1, 2, 3]), (0.5, [0, 1]), (0.1, [0]), (0.0, [])])
def test_who_teaches_is_forced(speed: ModuleType, share: float, first: list[int]) -> None:
    adapter = poem.adapt(make_net("bn"), "poem", select=speed.Forced(share), explore=Explore(2))
    adapter(_images(1, 4)[0])
    assert adapter.last.selected.nonzero()[:, 0].tolist() == first
    moves = 0 < len(first) < 4  # a block that is neither empty nor everyone begins one place further on
    assert adapter.last.updates == (2 if moves else min(len(first), 1))


def test_everyone_twice_is_two_updates(speed: ModuleType) -> None:
    for batch in (4, 1):
        for share in (1.0, 0.5):
            name, changes = speed.with_forced_selection("poem2", share, batch)
            adapter = poem.adapt(make_net("bn"), name, **changes)
            adapter(_images(1, batch)[0])
            assert adapter.last.updates == 2


def test_important_rows_come_first(speed: ModuleType) -> None:
    modes = ["eager", "bf16", "plain"]
    jobs = speed.plan(["resnet50-bn", "vit-b16"], [64, 1, 16], list(speed.METHODS), modes, [100, 50])
    assert len(jobs) == len(set(jobs))
    other = next(job for job in jobs if job.net == "vit-b16")
    before = jobs[: jobs.index(other)]
    assert {job.batch for job in before} == {64, 1}
    assert {job.method for job in before} == {*speed.METHODS[:7], "forward"}
    assert {job.select for job in before} == {100}
    assert [job.mode for job in before[:2]] == ["limit", "limit"], "shares of the limit need the network alone"
    assert "limit" not in {job.mode for job in before[2:]}


def test_a_run_on_the_cpu_leaves_its_file(
    speed: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speed.json"
    words = "--device cpu --nets tiny-bn --batches 2 --size 64 --seconds 0 --methods source,poem1 --no-ratio"
    assert speed.main([*words.split(), "--modes", "eager,bf16,plain", "--out", str(out)]) == 0
    told = json.loads(out.read_text())
    assert {"schema", "command", "host", "switches", "settings", "notes", "rows", "gains", "skipped"} <= told.keys()
    assert told["finished"]
    rows = {(row["net"], row["method"], row["mode"]): row for row in told["rows"]}
    row = rows["tiny-bn", "poem1", "eager"]
    assert row["status"] == "ok"
    assert row["updates"] == 1
    assert row["images_per_s"] > 0
    assert row["p99_ms"] >= row["median_ms"] > 0
    assert row["ratio_to_source"] > 1
    assert rows["tiny-bn", "poem1", "plain"]["updates"] == 1
    assert rows["tiny-bn", "forward", "eager"]["status"] == "ok"
    (gain,) = told["gains"]
    assert gain["by_mode"]["eager"] == row["images_per_s"] / gain["plain_images_per_s"]
    assert "x plain implementation" in capsys.readouterr().out
    assert speed.main(["--show", str(out)]) == 0
    assert "| tiny-bn | 2 | poem1 | eager |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nets resnet51", "expected some of resnet50-bn"),
        ("--show README.md", "expected a file that --out wrote"),
        ("--show nothing.json", "expected a file that --out wrote"),
        ("--batches four", "invalid numbers value"),
    ],
)
def test_unknown_names_are_refused_with_those_there_are(
    words: str, said: str, speed: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        speed.main([*words.split(), "--device", "cpu", "--no-ratio"])
    assert said in capsys.readouterr().err + str(stopped.value)


def test_what_the_budget_leaves_out_is_listed(speed: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    words = "--device cpu --nets tiny-bn --batches 2 --methods source --modes eager --budget -1 --no-ratio"
    speed.main([*words.split(), "--out", str(out)])
    told = json.loads(out.read_text())
    assert told["rows"] == []
    assert not told["finished"]
    assert told["skipped"] == ["tiny-bn batch 2 forward limit 100 %", "tiny-bn batch 2 source eager 100 %"]


def test_one_update_against_one_forward_in_a_process_of_its_own(speed: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    words = "--device cpu --ratio-net tiny-bn --ratio-batch 2 --size 64 --pairs 2 --threads 1 --profile"
    speed.main([*words.split(), "--out", str(out)])
    found = json.loads(out.read_text())["ratio"]
    assert found["status"] == "ok"
    assert found["pairs"] == 2
    assert found["allocator"] == speed.ALLOCATOR
    assert found["ratio"] == pytest.approx(found["poem1_s"] / found["forward_s"])
    assert found["at_most_4"] == (found["ratio"] <= 4)
    assert found["profile_poem1"]["top"][0]["share"] > 0


def test_shares_of_the_limit_and_gains_follow_from_the_rows(speed: ModuleType) -> None:
    def row(method: str, mode: str, images_per_s: float, **more: Any) -> dict[str, Any]:
        shared = {"net": "resnet50-bn", "batch": 64, "select": 100, "status": "ok", "as_asked": True}
        return {**shared, "method": method, "mode": mode, "images_per_s": images_per_s, **more}

    rows = [
        row("source", "bf16", 9000.0), row("poem1", "bf16", 3000.0), row("poem1", "captured", 9e9, as_asked=False),
        row("poem1", "plain", 500.0), row("forward", "bf16-compiled", 10000.0),
        row("forward", "bf16-compiled-graph", 18000.0), row("poem2", "bf16", 0.0, status="error"),
    ]  # fmt: skip
    speed.derive(rows)
    assert rows[1]["ratio_to_source"] == 3.0
    assert rows[1]["share_of_limit"] == pytest.approx(3000 / (18000 / 3.6))
    (gain,) = speed.gains(rows)
    assert (gain["best_mode"], gain["gain"]) == ("bf16", 6.0)


def test_from_files_to_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("PIL")
    stream_speed = _script("stream_speed")
    words = "--device cpu --net tiny-bn --precision fp32 --images 8 --batch 4 --batches 3 --workers 0,1 --prefetch 2"
    out = tmp_path / "stream.json"
    before = torch.get_num_threads()
    try:
        assert stream_speed.main([*words.split(), "--corruptions", "clean,contrast", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(before)
    content = json.loads(out.read_text())
    assert content["finished"]
    assert [(row["images"], row["workers"]) for row in content["rows"]] == [
        ("clean", 0), ("clean", 1), ("contrast", 0), ("contrast", 1)
    ]  # fmt: skip
    for row in content["rows"]:
        assert row["run_batches"] == row["in_turn_batches"] == 3
        assert row["of_adapter"] == pytest.approx(row["run_images_per_s"] / row["adapter_images_per_s"])
        assert row["batch_bytes"] == 4 * 3 * 224 * 224 * 4
        assert min(row["loader_cpu_ms"], row["run_cpu_ms"]) > 0
    assert "of the adapter" in capsys.readouterr().out
    with pytest.raises(ValueError, match="expected two batches or more, got 1"):
        stream_speed.timed([0], 1.0)


def test_what_handing_over_costs(tmp_path: Path) -> None:
    """Pixels against floating point: a quarter of the bytes, and less time of the process that takes them."""
    pytest.importorskip("PIL")
    hand_over, out, before = _script("hand_over"), tmp_path / "hand_over.json", torch.get_num_threads()
    words = "--batch 16 --batches 8 --turns 2 --images 16 --workers 1 --out"
    try:
        assert hand_over.main([*words.split(), str(out)]) == 0
    finally:
        torch.set_num_threads(before)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["images"], row["workers"]) for row in rows] == [("memory", 1), ("files", 1)]
    for row in rows:
        assert (row["slots"]["bytes"], row["tensors"]["bytes"]) == (16 * 3 * 224 * 224, 16 * 3 * 224 * 224 * 4)
        assert row["slots_over_tensors"]["taker_ms"] < 0.7
