"""The verdicts of `benchmarks/gpu_check.sh` on files as its stages leave them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


TREE = subprocess.run(
    [sys.executable, str(BENCHMARKS / "tree_hash.py")], capture_output=True, text=True, check=True
).stdout.strip()


def verdict(stage: str, folder: Path, *names: str) -> tuple[int, str]:
    """Exit code and last line."""
    command = [sys.executable, str(BENCHMARKS / "gpu_verdict.py"), stage, str(folder), *names]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.returncode, (ended.stdout.strip().splitlines() or [ended.stderr])[-1]


@pytest.mark.parametrize("stage", ["contract", "agreement", "speed", "stacked", "curves", "stream"])
def test_a_stage_that_left_nothing_has_failed(stage: str, tmp_path: Path) -> None:
    for names in ([], ["one.json"]):
        code, line = verdict(stage, tmp_path, *names)
        assert code == 1
        assert line.startswith(f"{stage}: FAILED: ")


def test_the_contract_is_the_sum_of_its_processes(tmp_path: Path) -> None:
    logs = ["contract-0.log", "contract-1.log"]
    for name in logs:
        (tmp_path / name).write_text("....\n4 passed in 3.21s\n")
    assert verdict("contract", tmp_path, *logs)[0] == 0
    written = json.loads((tmp_path / "contract.json").read_text())
    assert written["passed"] == 8
    assert written["verdict"] == "8 tests of the contract passed on a GPU with fast=True, 0 failed."
    (tmp_path / "contract-1.log").write_text("....\n1 failed, 3 passed in 3.21s\n")
    assert verdict("contract", tmp_path, *logs)[0] == 1
    (tmp_path / "contract-1.log").write_text("No module named pytest\n")
    code, line = verdict("contract", tmp_path, *logs)
    assert code == 1
    assert "1 of 2 processes did not finish" in line
    (tmp_path / "contract-1.log").unlink()
    assert verdict("contract", tmp_path, *logs)[0] == 1


def test_one_comparison_that_differs_fails_the_agreement(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "network": "n", "method": "tent", "captured": True, "notes": [], "batches": 2,
        "largest_difference_of_probabilities": 0.0, "selected_by_one_alone": 0, "same_totals": True,
    }  # fmt: skip
    for far, code in ((0.0, 0), (9e-6, 0), (2e-5, 1), (0.1, 1)):
        rows = [row, {**row, "largest_difference_of_probabilities": far}]
        (tmp_path / "agreement-n.json").write_text(json.dumps({"tree": TREE, "rows": rows, "left": []}))
        (tmp_path / "agreement.json").unlink(missing_ok=True)
        assert verdict("agreement", tmp_path, "agreement-n.json")[0] == code
        assert (tmp_path / "agreement.json").exists() == (code == 0), "no page quotes a stage that failed"


def test_a_file_that_is_missing_or_of_another_tree_fails_the_stage(tmp_path: Path) -> None:
    row = {"net": "n", "batch": 64, "method": "poem1", "mode": "bf16", "status": "ok", "as_asked": True, "notes": []}
    good = {"tree": TREE, "rows": [row], "skipped": []}
    (tmp_path / "speed-one.json").write_text(json.dumps(good))
    assert verdict("speed", tmp_path, "speed-one.json")[0] == 0
    code, line = verdict("speed", tmp_path, "speed-one.json", "speed-two.json")
    assert code == 1
    assert "speed-two.json is missing" in line
    for change, said in (({"tree": "0"}, "is of another tree"), ({"finished": False}, "is unfinished")):
        (tmp_path / "speed-two.json").write_text(json.dumps({**good, **change}))
        code, line = verdict("speed", tmp_path, "speed-one.json", "speed-two.json")
        assert code == 1
        assert f"speed-two.json {said}" in line


def test_a_stream_is_judged_by_its_best_number_of_processes(tmp_path: Path) -> None:
    rows = [{"images": "clean", "of_adapter": share} for share in (0.2, 0.97)]
    content = {"tree": TREE, "rows": rows, "skipped": [], "finished": True}
    (tmp_path / "stream.json").write_text(json.dumps(content))
    code, line = verdict("stream", tmp_path, "stream.json")
    assert (code, line) == (0, "stream: passed: 2 rows, 0 left out; clean 97% of the adapter")
    changes: list[dict[str, object]] = [{"skipped": [["fog", 4]]}, {"finished": False}, {"rows": []}]
    for changed in changes:
        (tmp_path / "stream.json").write_text(json.dumps({**content, **changed}))
        assert verdict("stream", tmp_path, "stream.json")[0] == 1


@pytest.mark.parametrize(("difference", "why_not", "code"), [(1e-7, "", 0), (1e-3, "", 1), (1e-7, "a teacher", 1)])
def test_stacked_streams_must_answer_as_each_alone(difference: float, why_not: str, code: int, tmp_path: Path) -> None:
    row = {"method": "tent", "why_not": why_not, "difference": difference, "ratio": 0.5}
    (tmp_path / "stacked.json").write_text(json.dumps({"tree": TREE, "rows": [row]}))
    assert verdict("stacked", tmp_path, "stacked.json")[0] == code
