"""What a batch cost and changed, on streams small enough to count by hand (tests/dial.py)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from dial import Dial, Stubborn, plains, spots
from nets import make_net
from torch import Generator, Tensor
from toys import images

import poem
from poem.adapter import Adapter
from poem.engine.accounting import BatchRecord
from poem.parts import (
    SAM,
    EntropyBelow,
    Equal,
    EveryCalls,
    Everyone,
    LossAverageBelow,
    MeanTeacher,
    NotRedundant,
    Occlusion,
    PLPDAbove,
    SoftLikelihoodRatio,
)


def dial(method: str, **changes: Any) -> Adapter:
    changes = {"lr": 5.0, "mean": (0, 0), "std": (1, 1), **changes}
    return poem.adapt(Dial(), method, guard=False, **changes)


COUNTS = (
    *("forwards", "backwards", "forwards_computed", "backwards_computed"),
    *("rounds", "updates", "taught", "selected", "newly_reliable", "no_longer_reliable"),
)


def counts(adapter: Adapter) -> dict[str, int]:
    """The counts of the last batch that are not zero."""
    last = adapter.last
    found = {name: int(torch.as_tensor(getattr(last, name)).sum()) for name in COUNTS}
    return {name: count for name, count in found.items() if count}


def costs(forwards: int, backwards: int = 0, computed: tuple[int, int] | None = None, **rest: int) -> dict[str, int]:
    """What a batch should have cost; rows computed are rows needed unless said otherwise."""
    ahead, back = computed or (forwards, backwards)
    found = {"forwards": forwards, "backwards": backwards, "forwards_computed": ahead, "backwards_computed": back}
    return {name: count for name, count in {**found, **rest}.items() if count}


def same(images: Tensor, rng: Generator) -> Tensor:
    return images


def four_views(image: Tensor, rng: Generator) -> Tensor:
    return image.repeat(4, 1, 1, 1)


def test_the_thresholds_lie_where_the_numbers_below_expect_them() -> None:
    for margin, inside, outside in ((0.4, 2.46, 2.45), (0.5, 2.10, 2.09)):
        adapter = dial("tent-filtered", lr=0.0, threshold=margin)
        adapter(spots(inside, outside, -inside, -outside))
        assert adapter.last.selected.tolist() == [True, False, True, False]


def test_source_passes_each_image_once_and_nothing_back() -> None:
    adapter = dial("source")
    for batch in (spots(3, 0), spots(3, 3, 0)):
        adapter(batch)
        assert counts(adapter) == costs(len(batch))
        assert adapter.last.loss is None
        assert adapter.last.skipped is None
    assert (adapter.totals.batches, adapter.totals.images, adapter.totals.skips) == (2, 5, 0)


def test_tent_passes_each_image_once_ahead_and_once_back() -> None:
    adapter = dial("tent")
    adapter(spots(3, 0, 1))
    assert counts(adapter) == costs(3, 3, rounds=1, updates=1, taught=3, selected=3)


def test_eata_counts_backward_passes_of_selected_samples_only() -> None:
    adapter = dial("eata", lr=0.1)
    adapter(spots(3, 4, 0))
    assert counts(adapter) == costs(3, 2, computed=(3, 3), rounds=1, updates=1, taught=2, selected=2)
    adapter(spots(3, -6, 0))  # the first is redundant by now, the second is new
    assert adapter.last.selected.tolist() == [False, True, False]
    assert counts(adapter) == costs(
        3, 1, computed=(4, 1), rounds=1, updates=1, taught=1, selected=1
    )  # once more, one row of it
    adapter(spots(3, 4))
    assert counts(adapter) == costs(2)
    assert adapter.last.skipped == "nothing selected"
    totals = adapter.totals
    assert (totals.forwards, totals.backwards, totals.updates, totals.taught, totals.skips) == (8, 3, 2, 3, 1)


def test_eata_counts_the_importance_of_weights_apart() -> None:
    adapter = dial("eata", source_data=[spots(3, 0, 1), spots(2, 1)])
    assert adapter.preparation == {"forwards": 5, "backwards": 5}
    assert adapter.totals.forwards == adapter.totals.backwards == 0
    adapter(spots(3, 0))
    assert (adapter.totals.forwards, adapter.totals.backwards) == (2, 1)
    adapter.reset()
    assert adapter.preparation == {"forwards": 5, "backwards": 5}
    assert dial("eata").preparation == {"forwards": 0, "backwards": 0}


def test_sar_needs_its_second_pass_for_selected_samples_and_updates_with_those_still_selected() -> None:
    adapter = dial("sar", step=SAM(0.3))  # the perturbation takes 0.3 off: 2.6 becomes 2.3
    adapter(spots(2.6, 4, 4, 0))
    assert counts(adapter) == costs(4 + 3, 3 + 2, computed=(8, 8), rounds=1, updates=1, taught=2, selected=3)
    assert adapter.last.skipped is None


def test_sar_skips_where_no_sample_passes_the_second_filter() -> None:
    adapter = dial("sar", step=SAM(0.3))
    before = adapter.state_dict()["tensors"]
    adapter(spots(2.5, 0))
    assert counts(adapter) == costs(2 + 1, 1, computed=(4, 4), rounds=1, selected=1)
    assert adapter.last.skipped is not None
    assert adapter.totals.skips == 1
    assert all(torch.equal(before[k], v) for k, v in adapter.state_dict()["tensors"].items() if k in before)


def test_sar_without_reliable_samples_passes_once() -> None:
    adapter = dial("sar")
    adapter(spots(1, 0))
    assert counts(adapter) == costs(2)
    assert adapter.last.skipped == "nothing selected"


def test_deyo_needs_its_second_pass_for_the_sure() -> None:
    adapter = dial("deyo", lr=0.1, select=EntropyBelow(0.5) & PLPDAbove(0.2, Occlusion()))
    adapter(torch.cat([spots(3, 2.3, 0), plains(3)]))
    assert adapter.last.selected.tolist() == [True, True, False, False]
    # The default weights destroy by patches, which is a pass of its own over the selected samples.
    assert counts(adapter) == costs(4 + 3 + 2, 2, computed=(12, 4), rounds=1, updates=1, taught=2, selected=2)


def test_deyo_asks_once_where_filter_and_weight_destroy_alike() -> None:
    adapter = dial("deyo", lr=0.1, select=EntropyBelow(0.5) & PLPDAbove(-2.0))
    adapter(torch.cat([spots(3, 2.3, 0), plains(3)]))
    assert counts(adapter) == costs(4 + 3, 3, computed=(8, 4), rounds=1, updates=1, taught=3, selected=3)
    adapter(spots(1, 0))  # a batch without sure samples still runs the pass, because batches stay whole
    assert counts(adapter) == costs(2, computed=(4, 0))


def test_memo_passes_every_view_there_and_back_and_the_image_once_more() -> None:
    adapter = dial("memo", views=four_views, std=(1 / 3, 1 / 3))
    adapter(spots(3, 0, 1) / 3)
    assert counts(adapter) == costs(3 * 5, 3 * 4, rounds=3, updates=3, taught=12, selected=3)
    assert adapter.totals.batches == 1


def test_memo_takes_65_passes_ahead_and_64_back_per_image() -> None:
    adapter = poem.adapt(make_net("gn"), "memo", mean=(0, 0, 0), std=(1, 1, 1))
    adapter(images(2, seed=1))
    assert (adapter.last.forwards, adapter.last.backwards) == (2 * 65, 2 * 64)


def test_cotta_forwards_student_source_and_teacher() -> None:
    adapter = dial("cotta", teacher=MeanTeacher(unsure=0.5, copies=4, augment=same), std=(1 / 3, 1 / 3))
    adapter(spots(3, 3, 0) / 3)
    assert counts(adapter) == costs(3 + 3 + 3, 3, rounds=1, updates=1, taught=3, selected=3)


def test_cotta_forwards_each_copy_through_the_teacher_where_the_source_is_unsure() -> None:
    adapter = dial("cotta", teacher=MeanTeacher(unsure=0.9, copies=4, augment=same), std=(1 / 3, 1 / 3))
    adapter(spots(3, 3, 0) / 3)
    assert counts(adapter) == costs(3 + 3 + 4 * 3, 3, rounds=1, updates=1, taught=3, selected=3)


# One update: no sample is near the threshold. Two: the majority moves the shift up by 0.3, 2.3 enters and -2.6 leaves.
STILL, MOVING, NOBODY = (3.5, 3.5, 0), (3, 3, 3, 2.3, -2.6), (1, 0)


@pytest.mark.parametrize("changes", [{}, {"branch": None}], ids=["branch", "no branch"])
def test_poem_forwards_again_after_each_update(changes: dict[str, Any]) -> None:
    adapter = dial("poem", **changes)
    adapter(spots(*MOVING))
    expected = costs(
        *(3 * 5, 4 + 4), computed=(15, 10),
        rounds=2, updates=2, taught=8, selected=4, newly_reliable=1, no_longer_reliable=1,
    )  # fmt: skip
    assert counts(adapter) == expected
    assert adapter.last.newly_reliable.tolist() == [False, False, False, True, False]
    assert adapter.last.no_longer_reliable.tolist() == [False, False, False, False, True]

    adapter.reset()
    adapter(spots(*STILL))
    assert counts(adapter) == costs(2 * 3, 2, computed=(6, 3), rounds=1, updates=1, taught=2, selected=2)

    adapter.reset()
    adapter(spots(*NOBODY))
    assert counts(adapter) == costs(2)
    assert adapter.last.skipped == "nothing selected"


def test_poem_with_one_update_forwards_twice_and_still_counts_newly_reliable_samples() -> None:
    adapter = dial("poem", rounds=1)
    adapter(spots(*MOVING))
    expected = costs(
        2 * 5, 4, computed=(10, 5), rounds=1, updates=1, taught=4, selected=4, newly_reliable=1, no_longer_reliable=1
    )
    assert counts(adapter) == expected


def test_totals_are_the_sums_over_the_stream() -> None:
    adapter = dial("poem", lr=0.0)  # nothing moves, so every set stays the same
    for batch in (STILL, NOBODY, MOVING):
        adapter(spots(*batch))
    totals = adapter.totals
    assert (totals.batches, totals.images) == (3, 10)
    assert (totals.forwards, totals.forwards_computed) == (2 * 3 + 2 + 2 * 5, 2 * 3 + 2 + 2 * 5)
    assert (totals.backwards, totals.backwards_computed) == (2 + 4, 3 + 5)
    assert (totals.rounds, totals.updates, totals.taught, totals.selected) == (2, 2, 6, 6)
    assert (totals.newly_reliable, totals.no_longer_reliable, totals.resets, totals.skips) == (0, 0, 0, 1)
    adapter.reset()
    assert adapter.totals.batches == adapter.totals.forwards == adapter.totals.skips == 0


def test_totals_agree_with_the_batches_of_a_stream_that_learns() -> None:
    adapter = dial("poem", lr=1.0)
    sums = dict.fromkeys(COUNTS, 0)
    for batch in (STILL, MOVING, NOBODY, MOVING):
        adapter(spots(*batch))
        for name, count in counts(adapter).items():
            sums[name] += count
    assert sums["updates"] >= 3
    assert {name: getattr(adapter.totals, name) for name in COUNTS} == sums


def test_deyo_with_poem_spends_a_second_pass_per_look_that_chooses() -> None:
    select = EntropyBelow(0.5) & PLPDAbove(0.15, Occlusion())
    adapter = dial("deyo+poem", lr=0.5, select=select, weigh=Equal())
    adapter(torch.cat([spots(3, 3, 0), plains(3)]))  # the set is the same after one update
    assert counts(adapter) == costs(4 + 3 + 4 + 3, 2, computed=(16, 4), rounds=1, updates=1, taught=2, selected=2)

    adapter = dial("deyo+poem", lr=3.0, select=select, weigh=Equal())
    adapter(spots(3, 3, 3, 1.95))  # the last one enters; the pass after the last update selects nothing
    expected = costs(
        4 + 3 + 4 + 4 + 4, 3 + 4, computed=(20, 8), rounds=2, updates=2, taught=7, selected=3, newly_reliable=1
    )
    assert counts(adapter) == expected


def test_repeated_updates_keep_the_set_and_answer_after_the_last() -> None:
    adapter = dial("tent-filtered*")
    adapter(spots(*MOVING))
    assert counts(adapter) == costs(3 * 5, 4 + 4, computed=(15, 10), rounds=2, updates=2, taught=8, selected=4)


def test_a_branch_as_second_pass_doubles_what_is_computed_and_not_what_is_needed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="poem"):
        adapter = poem.adapt(Stubborn(), "poem", lr=5.0)
        adapter(spots(*STILL))
    assert counts(adapter) == costs(2 * 3, 2, computed=(12, 3), rounds=1, updates=1, taught=2, selected=2)
    assert len(adapter.last.notes) == len(caplog.records) == 1
    adapter(spots(*STILL))
    assert adapter.last.notes == []


def test_the_way_back_is_counted_when_the_loss_average_is_low() -> None:
    adapter = dial("sar", step=SAM(0.01), recover=LossAverageBelow(0.1))
    adapter(spots(3))  # entropy 0.19
    assert (adapter.last.reset, adapter.totals.resets) == (False, 0)
    adapter.reset()
    adapter(spots(6))  # entropy 0.02
    assert (adapter.last.reset, adapter.totals.resets) == (True, 1)
    assert adapter.totals.updates == 1


def test_the_way_back_is_counted_when_the_calls_are_up() -> None:
    adapter = dial("rdumb", recover=EveryCalls(2))
    resets = []
    for _ in range(5):
        adapter(spots(1, 0))
        resets.append(adapter.last.reset)
    assert resets == [False, False, True, False, True]
    assert adapter.totals.resets == 2


def test_an_update_that_is_not_finite_is_a_skip() -> None:
    adapter = dial("tent", minimise=SoftLikelihoodRatio(clip=1.0))
    adapter(spots(200.0, 0))  # a probability of exactly 1 makes the ratio infinite
    assert counts(adapter) == costs(2, 2, rounds=1, selected=2)
    assert adapter.last.skipped is not None
    assert adapter.totals.skips == 1


def test_frozen_calls_are_not_in_the_books() -> None:
    adapter = dial("poem")
    adapter(spots(*STILL))
    before, last = adapter.totals, adapter.last
    with adapter.frozen():
        adapter(spots(*MOVING))
    assert adapter.totals == before
    assert adapter.last is last


def test_entropies_are_those_of_the_first_look_and_the_last() -> None:
    adapter = dial("poem")
    adapter(spots(*STILL))
    probability = torch.tensor([3.5, 3.5, 0.0]).sigmoid()
    by_hand = -(probability * probability.log() + (1 - probability) * (1 - probability).log())
    torch.testing.assert_close(adapter.last.first_entropy, by_hand)
    assert bool((adapter.last.last_entropy[:2] < by_hand[:2]).all())
    torch.testing.assert_close(adapter.last.first_logits.softmax(1)[:, 0], probability)


def test_every_sample_is_selected_without_a_filter() -> None:
    adapter = dial("eta", select=Everyone() & NotRedundant(1.01))
    adapter(spots(*NOBODY))
    assert counts(adapter)["selected"] == 2


def test_what_was_found_image_by_image_is_put_together() -> None:
    """The batch made an update if one image did, its loss is the last update's, and its rows are in order."""
    parts = [BatchRecord(), BatchRecord(), BatchRecord()]
    for at, part in enumerate(parts):
        part.selected, part.first_logits = torch.tensor([at == 1]), torch.full((1, 2), float(at))
        part.newly_reliable = part.no_longer_reliable = torch.tensor([False])
        part.none_selected = at != 1
    parts[0].loss_value, parts[1].loss_value = torch.tensor(1.0), torch.tensor(2.0)
    whole = BatchRecord()
    whole.merge(parts)
    assert (whole.skipped, whole.loss) == (None, 2.0)
    assert whole.selected.tolist() == [False, True, False]
    assert whole.first_logits[:, 0].tolist() == [0.0, 1.0, 2.0]
    idle = BatchRecord()
    idle.merge([parts[0], parts[2]])
    assert idle.skipped == "nothing selected"


def test_counts_follow_the_model_to_another_device() -> None:
    from poem.engine.accounting import BatchRecord, RunningTotals

    books, entry = RunningTotals(), BatchRecord()
    for device in ("meta", "cpu"):
        entry.anomalies = torch.zeros(2, dtype=torch.long, device=device)
        if device == "cpu":
            books.anomalies = torch.ones(2, dtype=torch.long)
        books.add_batch(entry, 1)
        entry.anomalies = None
        books.add_batch(entry, 1)
    assert books.anomalies is not None
    assert books.anomalies.tolist() == [1, 1]
