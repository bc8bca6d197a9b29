"""Where images of a bank are learnt from: what the record says, which pass answers, and which statistics are kept."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from nets import make_net
from torch import Tensor

import poem
from poem.parts import AdaptBranch, MemoryBank, Readout, SiameseEntropy
from poem.parts.statistics import moments

SETTINGS: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "lr": 0.01}


def images(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("which", ["first", "last", "teacher"])
def test_the_student_s_statistics_are_kept_whichever_pass_answers(which: Literal["first", "last", "teacher"]) -> None:
    bank = MemoryBank(capacity=8, every=8)
    adapter = poem.adapt(make_net("bn"), "rotta", views=bank, readout=Readout(which), **SETTINGS)
    before = adapter.state_dict()["tensors"]
    for seed in range(3):
        adapter(images(8, seed))
    after = adapter.state_dict()["tensors"]
    keys = [key for key in before if key.startswith("memory/statistics.") and key.endswith(".mean")]
    assert keys
    assert all(not torch.equal(before[key], after[key]) for key in keys)


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_batch_without_an_update_is_answered_by_the_student_if_it_is_to_answer(
    which: Literal["first", "last"],
) -> None:
    bank = MemoryBank(capacity=8, every=1000)
    adapter = poem.adapt(make_net("gn"), "rotta", views=bank, readout=Readout(which), **SETTINGS)
    with adapter.frozen():
        expected = adapter(images(4))
    torch.testing.assert_close(adapter(images(4)), expected)


def test_the_record_is_of_the_batch_also_where_bank_and_batch_have_the_same_size() -> None:
    adapter = poem.adapt(make_net("bn", sharpness=4.0), "rotta", views=MemoryBank(capacity=8, every=8), **SETTINGS)
    for seed in range(4):
        answer = adapter(images(8, seed))
        torch.testing.assert_close(adapter.last.first_logits, answer)
        log_probs = answer.log_softmax(1)
        torch.testing.assert_close(adapter.last.first_entropy, -(log_probs.exp() * log_probs).sum(1))
    assert adapter.totals.updates == 4


def test_a_bank_of_half_precision_images_counts_on() -> None:
    bank = MemoryBank(capacity=4, every=100)
    net = make_net("gn").bfloat16()
    adapter = poem.adapt(net, "rotta", views=bank, **SETTINGS)
    for seed in range(10):
        adapter(images(50, seed).bfloat16())
    assert int(adapter.state_dict()["tensors"]["memory/views.count"]) == 500
    assert adapter.totals.updates == 5


def test_tensors_of_a_part_that_no_loss_would_train_are_refused() -> None:
    adapter = poem.adapt(make_net("gn"), "poem", branch=AdaptBranch(teach=SiameseEntropy()))
    with pytest.raises(
        ValueError, match=r"trainable tensors of parts in minimise= alone, got branch\.teach\.predictor"
    ):
        adapter(images(4))


def test_rows_outside_the_mask_stay_out_of_the_moments_even_if_they_are_not_finite() -> None:
    x = torch.randn(4, 3, 2, 2)
    x[1] = torch.inf
    mask = torch.tensor([True, False, True, True])
    for ours, plain in zip(moments(x, mask), moments(x[mask], None), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("method", ["neo", "zerosiam"])
def test_a_function_of_the_user_s_that_the_last_layer_would_skip_is_an_error(method: str) -> None:
    adapter = poem.adapt(make_net("gn"), method, logits=lambda out: 3 * out)
    with pytest.raises(ValueError, match="which logits= would skip"):
        adapter(images(4))


def test_an_export_with_a_branch_has_the_averages_of_the_layers_before_the_split() -> None:
    adapter = poem.adapt(make_net("bn"), "poem", statistics=poem.parts.RunningMean(0.3))
    for seed in range(3):
        adapter(images(8, seed))
    exported = adapter.export()
    means = [head.norm1.running_mean for head in exported.heads]  # type: ignore[union-attr]
    assert torch.equal(means[0], means[1])
