"""Every planted fault still has its place in the code, so that the list can be run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILE = ROOT / "benchmarks" / "planted_faults.py"


def faults() -> list[Any]:
    spec = importlib.util.spec_from_file_location("planted_faults", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.FAULTS)


@pytest.mark.skipif(not FILE.is_file(), reason="a copy without benchmarks")
def test_every_planted_fault_has_its_place_and_its_tests() -> None:
    found = faults()
    lost = [
        f"{each.name}: its text stands {count} times in {each.file}"
        for each in found
        if (count := (ROOT / "src" / "poem" / each.file).read_text(encoding="utf-8").count(each.right)) != 1
    ]
    assert not lost
    assert all((ROOT / "tests" / name).is_file() for each in found for name in each.tests)
    assert len({each.name for each in found}) == len(found)
    assert all(each.right != each.wrong for each in found)
