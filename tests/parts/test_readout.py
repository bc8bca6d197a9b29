"""Which forward pass answers: before or after the update; and whose probabilities are mixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import NETS, adapted, eight_views, entropy, frozen, net, stream, with_batch_statistics

import poem
from poem.parts import (
    AdaptBranch,
    EntropyBelow,
    MeanTeacher,
    PLPDAbove,
)


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("method", ["tent", "eta", "eata", "sar", "deyo", "rdumb", "cotta"])
def test_most_methods_answer_with_what_they_knew_before_the_update(method: str, kind: str) -> None:
    (batch, *_) = stream()
    changes: dict[str, Any] = {"select": EntropyBelow(0.5) & PLPDAbove(-0.5)} if method == "deyo" else {}
    if method == "cotta":
        changes["teacher"] = MeanTeacher(momentum=0.5)
    adapter = adapted(kind, method, **changes)
    before = frozen(adapter, batch)
    answer = adapter(batch)
    assert adapter.last.updates == 1
    torch.testing.assert_close(answer, before, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(answer, with_batch_statistics(net(kind))(batch).detach(), rtol=1e-9, atol=1e-9)
    assert (frozen(adapter, batch) - answer).abs().max() > 1e-4


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("method", ["poem", "poem-official-v2", "tent+poem", "tent+poem-i", "tent+poem-ii", "sar*"])
def test_poem_answers_with_what_it_knows_after_the_last_update(method: str, kind: str) -> None:
    (batch, *_) = stream()
    changes: dict[str, Any] = {}
    if method == "poem-official-v2":
        changes["select"] = EntropyBelow(0.4, first=0.5) & PLPDAbove(-0.5)
    adapter = adapted(kind, method, **changes)
    before = frozen(adapter, batch)
    answer = adapter(batch)
    assert adapter.last.updates > 0
    torch.testing.assert_close(frozen(adapter, batch), answer, rtol=1e-9, atol=1e-9)
    assert (answer - before).abs().max() > 1e-4


def test_memo_answers_after_the_update_and_forgets_it() -> None:
    (batch, *_) = stream(3, 3)
    adapter = adapted("gn", "memo", views=eight_views)
    before = frozen(adapter, batch)
    answer = adapter(batch)
    assert (answer - before).abs().max() > 1e-4
    assert torch.equal(frozen(adapter, batch), before)


def test_lame_answers_log_probabilities() -> None:
    (batch, *_) = stream()
    answer = poem.adapt(net("gn"), "lame")(batch)
    assert bool((answer <= 0).all())
    torch.testing.assert_close(answer.exp().sum(1), torch.ones(12, dtype=torch.float64))


def test_mixing_probabilities_and_mixing_logits_are_two_things() -> None:
    source = torch.tensor([[4.0, 0.0, 0.0]], dtype=torch.float64)
    branch = torch.tensor([[0.0, 4.0, 0.0]], dtype=torch.float64)
    probabilities = AdaptBranch(combine="probabilities").together(source, branch)
    logits = AdaptBranch(combine="logits").together(source, branch)
    torch.testing.assert_close(probabilities.exp(), (source.softmax(1) + branch.softmax(1)) / 2)
    torch.testing.assert_close(logits, (source + branch) / 2)
    assert abs(float(entropy(probabilities) - entropy(logits))) > 0.05
    third = AdaptBranch(alpha=0.3).together(source, branch)
    torch.testing.assert_close(third.exp(), 0.3 * source.softmax(1) + 0.7 * branch.softmax(1))
    far = AdaptBranch().together(torch.tensor([[1000.0, 0.0]]), torch.tensor([[1000.0, 0.0]]))
    assert far.isfinite().all()
    assert float(far[0, 1]) == pytest.approx(-1000)
