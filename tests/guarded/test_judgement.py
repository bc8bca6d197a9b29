"""What a guard computes of a batch's answers is the same captured, and is read once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tape
import torch
import toys
from nets import make_net

import poem
from poem.guarded.judgement import VERDICTS, answers, judged_tensors, judgement
from poem.guarded.signals import Averages

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


def log_probs(seed: int, rows: int = 6, classes: int = 5) -> torch.Tensor:
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed)).log_softmax(1)


def test_where_the_adapted_answer_is_not_finite_every_verdict_answers_with_the_source() -> None:
    source, adapted = log_probs(0), log_probs(1)
    adapted[2] = torch.nan
    found = answers(source, adapted)
    assert found.sound.tolist() == [True, True, False, True, True, True]
    for verdict in VERDICTS:
        assert torch.equal(found.by(verdict)[2], source[2])
    assert torch.equal(found.by("source"), source)
    assert torch.equal(found.by("adapted")[0], adapted[0])
    assert float(found.worse[2]) == 0.5


def test_the_numbers_are_those_of_the_tensors() -> None:
    source, adapted, start = log_probs(0), log_probs(1), Averages.start(5, torch.device("cpu"))

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return judged_tensors(100, *tensors)

    seen = judgement(call, start, source, adapted, log_probs(2), log_probs(3))
    numbers = seen.read()
    assert numbers.averages == tuple(seen.averages.numbers().tolist())
    assert numbers.finite
    assert numbers.differ == dict(zip(VERDICTS, seen.answers.differ.tolist(), strict=True))
    assert numbers.differ["source"] == 0
    assert numbers.worse == seen.answers.worse.tolist()
    torch.testing.assert_close(torch.tensor(numbers.entropies), -(source.exp() * source).sum(1))
    adapted[0, 0] = torch.nan
    assert not judgement(call, start, source, adapted).read().finite


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the numbers are captured: on tapes, or as CUDA graphs."""
    if request.param == "cuda":
        yield "cuda"
        return
    with tape.installed():
        yield "cpu"


@pytest.mark.parametrize(
    ("net", "method", "settings"), [("bn", "auto", {}), ("gn", "tent", {}), ("bn", "auto", {"view": "none"})]
)
def test_a_guard_whose_numbers_are_captured_decides_as_one_that_runs_eagerly(
    net: str, method: str, settings: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*given: Any) -> list[torch.Tensor]:
        calls.append(1)
        return judged_tensors(*given)

    monkeypatch.setattr("poem.guarded.guard.judged_tensors", counted)

    def run(fast: bool) -> list[Any]:
        guarded = poem.adapt(make_net(net).to(device), method, fast=fast, guard=settings or True)
        found: list[Any] = []
        for number in range(6):
            answer = guarded(toys.images(4, seed=number).to(device)).cpu()
            assert guarded.signals is not None
            found += [answer, torch.tensor([each or 0.0 for each in guarded.signals.as_dict().values()])]
            found += [torch.tensor([VERDICTS.index(each) for each in guarded.verdicts])]
        return found

    plain = run(fast=False)
    assert len(calls) == 6
    fast = run(fast=True)
    assert len(calls) == 6 + 2  # once eagerly and once to capture it; then it is replayed
    for one, two in zip(plain, fast, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
