"""Orders: scenarios and arrangements, the same for every method."""

from __future__ import annotations

import hashlib
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import ConvNet

import poem
from poem.streams import corruptions
from poem.streams.orders import (
    CLEAN,
    CORRUPTIONS,
    EXTRA,
    SCENARIOS,
    Dirichlet,
    InOrder,
    LabelShift,
    Order,
    Segment,
    Shift,
    Sorted,
    Visit,
    continual,
    correlated,
    forgetting,
    generator,
    gradual,
    imbalanced,
    joined,
    label_shift,
    mixed,
    one_by_one,
    recurring,
    scenario,
    single,
)

IMAGENET = np.repeat(np.arange(1000), 50)
TWO = ("fog", "snow")
few = settings(max_examples=25, deadline=None)


def sha(indices: np.ndarray) -> str:
    return hashlib.sha256(indices.astype("<i8").tobytes()).hexdigest()


def everything(order: Order, labels: int | np.ndarray) -> list[tuple[tuple[Shift, ...], bool, list[int], list[int]]]:
    return [(each.shifts, each.reset, each.indices.tolist(), each.which.tolist()) for each in order.over(labels)]


@pytest.mark.parametrize(
    ("seed", "imbalance", "digest"),
    [
        (2022, 500_000, "659082b354831f34"),
        (2023, 500_000, "4c53bb0caa8252f8"),
        (2022, 1, "47a58ef1a05e1e09"),
        (2023, 1, "47a58ef1a05e1e09"),
    ],
)
def test_label_shift_reproduces_the_published_files(seed: int, imbalance: float, digest: str) -> None:
    indices = label_shift(IMAGENET, imbalance=imbalance, length=100_000, seed=seed)
    assert indices.dtype == np.int64
    assert sha(indices)[:16] == digest


def test_label_shift_begins_as_published() -> None:
    first = label_shift(IMAGENET, imbalance=500_000, length=100_000, seed=2022)[:8]
    assert first.tolist() == [24635, 24638, 24636, 24636, 24606, 24623, 24616, 24603]
    other = label_shift(IMAGENET, imbalance=500_000, length=100_000, seed=2023)[:4]
    assert other.tolist() == [10090, 10089, 10056, 10096]


def dominant(indices: np.ndarray, labels: np.ndarray, classes: int) -> list[int]:
    blocks = np.array_split(labels[indices], classes)
    return [int(np.bincount(block).argmax()) for block in blocks]


@pytest.mark.parametrize(("imbalance", "shuffles"), [(1000, 2), (5000, 6), (500_000, 7), (700, 1), (123_456, 1)])
def test_a_published_imbalance_uses_the_shuffle_at_its_position(imbalance: float, shuffles: int) -> None:
    labels = np.repeat(np.arange(10), 30)
    found = dominant(label_shift(labels, imbalance=imbalance, length=1000, seed=7), labels, 10)
    shuffler, order = random.Random(7), list(range(10))
    for _ in range(shuffles):
        order = list(range(10))
        shuffler.shuffle(order)
    assert found == order


def test_label_shift_takes_any_labels_by_class_and_position() -> None:
    labels = np.repeat([3, 11, 40], 20)
    mess = np.random.RandomState(0).permutation(60)
    straight = label_shift(labels, imbalance=500_000, length=90, seed=1)
    crossed = label_shift(labels[mess], imbalance=500_000, length=90, seed=1)
    assert labels[straight].tolist() == labels[mess][crossed].tolist()
    by_class = {c: np.flatnonzero(labels[mess] == c) for c in (3, 11, 40)}
    assert crossed.tolist() == [int(by_class[labels[i]][i % 20]) for i in straight]


def test_label_shift_with_a_length_that_classes_do_not_divide() -> None:
    assert len(label_shift(np.repeat(np.arange(7), 5), length=100)) == 100
    assert len(label_shift(np.repeat(np.arange(7), 5), length=3)) == 3
    assert len(label_shift(np.repeat(np.arange(7), 5))) == 700


@pytest.mark.parametrize("bad", [{"imbalance": 0.5}, {"imbalance": float("inf")}, {"length": 0}])
def test_label_shift_refuses_bad_arguments(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected a finite imbalance >= 1 and a length >= 1"):
        label_shift([0, 1], **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected labels"):
        label_shift([])


PERMUTING = [name for name in SCENARIOS if name not in ("label-shift", "correlated")]


@few
@given(st.sampled_from(PERMUTING), st.integers(1, 60), st.integers(0, 2**40))
def test_every_domain_is_a_permutation(name: str, n: int, seed: int) -> None:
    order = scenario(name, corruptions=TWO, seed=seed)
    counted = 0
    for segment in order.over(n):
        for k in range(len(segment.shifts)):
            assert sorted(segment.indices[segment.which == k]) == list(range(n))
        counted += len(segment)
    assert counted == order.count(n)


@few
@given(
    st.lists(st.integers(0, 5), min_size=12, max_size=80),
    st.sampled_from([0.01, 0.1, 1.0, 100.0]),
    st.sampled_from([1, 3, None]),
    st.integers(0, 1000),
)
def test_dirichlet_and_sorted_are_permutations(labels: list[int], delta: float, chunks: int | None, seed: int) -> None:
    rng = generator(seed, "correlated", "fog")
    arrived = Dirichlet(delta, minimum=0, chunks=chunks)(np.array(labels), rng, seed)
    assert sorted(arrived) == list(range(len(labels)))
    arrived = Sorted()(np.array(labels), rng, seed)
    assert sorted(arrived) == list(range(len(labels)))
    assert np.array(labels)[arrived].tolist() == sorted(labels)


@few
@given(st.sampled_from(list(SCENARIOS)), st.integers(0, 100))
def test_an_order_depends_on_its_seed_and_on_nothing_else(name: str, seed: int) -> None:
    labels = np.arange(60) % 3
    order = scenario(name, corruptions=TWO, seed=seed)
    first = everything(order, labels)
    np.random.seed(seed)
    random.seed(seed)
    torch.manual_seed(seed)
    before = (np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist())  # type: ignore[index]
    again = []
    for segment in order.over(labels):
        again.append((segment.shifts, segment.reset, segment.indices.tolist(), segment.which.tolist()))
        np.random.rand()
        random.random()
        torch.rand(3)
    assert again == first
    assert everything(pickle.loads(pickle.dumps(order)), labels) == first
    np.random.seed(seed)
    random.seed(seed)
    torch.manual_seed(seed)
    everything(order, labels)
    assert before == (np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist())  # type: ignore[index]


def test_another_seed_scenario_or_corruption_is_another_order() -> None:
    def first(order: Order) -> list[int]:
        return [int(index) for index in next(order.over(200)).indices]

    orders = [
        first(single("fog")), first(single("fog", seed=1)), first(continual("fog")), first(single("snow")),
    ]  # fmt: skip
    assert len({tuple(each) for each in orders}) == 4
    assert first(single("fog", severity=1)) == orders[0]  # severities are compared on the same order


def test_the_indices_of_an_order_stay_the_same_between_versions() -> None:
    whole = np.concatenate([segment.indices for segment in continual(seed=3).over(100)])
    assert sha(whole)[:16] == "fa7ef87b08e60551"


def test_random_numbers_of_a_method_do_not_change_the_order() -> None:
    seen: dict[str, list[int]] = {}
    images = torch.rand(48, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for method in ("tent", "deyo"):
        torch.manual_seed(0)
        adapter = poem.adapt(ConvNet(), method, mean=(0, 0, 0), std=(1, 1, 1))
        seen[method] = []
        for segment in continual(TWO, seed=5).over(48):
            for piece in segment.cut(20):
                seen[method] += piece.indices.tolist()
                adapter(images[piece.indices])
                if method == "deyo":
                    torch.rand(7)
                    np.random.rand(7)
    assert len(seen["tent"]) == 96
    assert seen["tent"] == seen["deyo"]


def resets(order: Order) -> list[bool]:
    return [visit.reset for visit in order.visits]


def walk(order: Order) -> list[str]:
    return [str(shift) for visit in order.visits for shift in visit.shifts]


def test_single_resets_at_each_and_continual_at_the_first() -> None:
    assert resets(single()) == [True] * 15
    assert resets(continual()) == [True] + [False] * 14
    assert walk(continual()) == [f"{name} 5" for name in CORRUPTIONS]


def test_gradual_goes_through_the_severities_up_and_down() -> None:
    up_down = [1, 2, 3, 4, 5, 4, 3, 2, 1]
    assert [visit.shifts[0].severity for visit in gradual(TWO).visits] == up_down * 2
    cotta = gradual(TWO, first_descends=True)
    assert [visit.shifts[0].severity for visit in cotta.visits] == [5, 4, 3, 2, 1, *up_down]
    assert sum(resets(cotta)) == 1
    with pytest.raises(ValueError, match="clean data"):
        gradual(["clean"])


def test_mixed_pools_all_shifts_in_one_segment() -> None:
    (segment,) = mixed(seed=1).over(40)
    assert len(segment) == 600
    assert len(set(zip(segment.which.tolist(), segment.indices.tolist(), strict=True))) == 600
    assert len(set(segment.which[:30].tolist())) > 5
    with pytest.raises(ValueError, match="expected one domain, got 15"):
        _ = segment.shift


def test_recurring_shuffles_every_visit_anew() -> None:
    segments = list(recurring(TWO, cycles=3).over(50))
    assert [str(each.shift) for each in segments] == ["fog 5", "snow 5"] * 3
    assert len({tuple(each.indices.tolist()) for each in segments}) == 6
    assert [each.reset for each in segments] == [True] + [False] * 5
    with pytest.raises(ValueError, match="cycles >= 1"):
        recurring(cycles=0)


def test_correlated_runs_of_one_class_are_long() -> None:
    labels = np.random.RandomState(0).permutation(np.repeat(np.arange(10), 100))

    def runs(order: Order) -> int:
        arrived = labels[next(order.over(labels)).indices]
        return 1 + int((np.diff(arrived) != 0).sum())

    assert runs(correlated("fog")) == 10
    assert 10 < runs(correlated("fog", delta=0.1)) < 100
    assert runs(continual("fog")) > 800


def test_dirichlet_keeps_chunks_near_their_share() -> None:
    labels = np.repeat(np.arange(10), 100)
    rng = generator(0, "correlated", "fog")
    counts = Dirichlet(0.1)._counts([100] * 10, 10, rng)
    assert counts.sum(1).tolist() == [100] * 10
    assert counts.sum(0).min() >= 10
    assert len(Dirichlet(1e-5, minimum=0)(labels, rng, 0)) == 1000  # draws too small for a float


def test_dirichlet_raises_after_its_last_try() -> None:
    labels = np.repeat(np.arange(10), 10)
    with pytest.raises(
        ValueError, match=r"expected 10 chunks of at least 10 images; the best of 3 draws .* raise delta"
    ):
        Dirichlet(0.01, minimum=10, tries=3)(labels, generator(0, "a", "b"), 0)
    with pytest.raises(ValueError, match=r"got 100 images in all; pass minimum=10"):
        Dirichlet(0.01, minimum=11)(labels, generator(0, "a", "b"), 0)
    for bad in ({"delta": 0.0}, {"tries": 0}, {"minimum": -1}, {"chunks": 0}):
        with pytest.raises(ValueError, match="expected delta > 0"):
            Dirichlet(**bad)


def test_imbalanced_repeats_the_same_indices_at_every_corruption() -> None:
    labels = np.repeat(np.arange(10), 20)
    order = imbalanced(TWO, length=200)
    fog, snow = order.over(labels)
    assert fog.indices.tolist() == snow.indices.tolist()
    assert fog.indices.tolist() == label_shift(labels, imbalance=500_000, length=200, seed=2022).tolist()
    assert fog.reset
    assert snow.reset
    assert order.count(200, 10) == 400
    assert imbalanced(TWO).count(200, 10) == 2000


def test_forgetting_puts_clean_data_after_every_shift() -> None:
    assert walk(forgetting(TWO)) == ["fog 5", "clean", "snow 5", "clean"]
    assert sum(resets(forgetting(TWO))) == 1


def test_one_by_one_prescribes_its_batch_size() -> None:
    assert one_by_one(TWO).batch_size == 1
    assert resets(one_by_one(TWO)) == [True, True]


@few
@given(st.integers(1, 200), st.integers(1, 70))
def test_short_last_batches_are_kept(n: int, size: int) -> None:
    (segment,) = single("fog").over(n)
    pieces = list(segment.cut(size))
    assert np.concatenate([piece.indices for piece in pieces]).tolist() == segment.indices.tolist()
    assert [len(piece) for piece in pieces[:-1]] == [size] * (len(pieces) - 1)
    assert len(pieces[-1]) == n - size * (len(pieces) - 1)
    assert [piece.reset for piece in pieces] == [True] + [False] * (len(pieces) - 1)


def test_the_last_batch_of_imagenet_has_sixteen_images() -> None:
    sizes = [len(piece) for piece in next(single("fog").over(50_000)).cut(64)]
    assert (len(sizes), sizes[-1]) == (782, 16)


def test_joined_segments_give_batches_of_two_domains() -> None:
    (whole,) = joined(continual(TWO).over(50))
    fog, snow = continual(TWO).over(50)
    assert whole.indices.tolist() == fog.indices.tolist() + snow.indices.tolist()
    assert whole.which.tolist() == [0] * 50 + [1] * 50
    assert [len(piece) for piece in whole.cut(64)] == [64, 36]
    assert len(list(joined(single(TWO).over(50)))) == 2


def test_a_composed_order() -> None:
    labels = np.repeat(np.arange(5), 40)
    order = recurring(TWO, cycles=2, within=Dirichlet(0.1, minimum=0, chunks=5))
    assert len(list(order.over(labels))) == 4
    assert single("fog", within=InOrder()).over(4).__next__().indices.tolist() == [0, 1, 2, 3]
    assert "Dirichlet(delta=0.1" in order.describe()["order"]
    assert gradual(TWO).describe()["severity"] == (1, 2, 3, 4, 5)


def test_names_are_those_of_the_corruptions() -> None:
    assert tuple(corruptions.CORRUPTIONS) == CORRUPTIONS
    assert tuple(corruptions.EXTRA) == EXTRA


def test_bad_input_says_what_to_type() -> None:
    with pytest.raises(ValueError, match="did you mean 'gaussian_noise'"):
        Shift("gausian_noise", 5)
    for severity in (0, 6, -1):
        with pytest.raises(ValueError, match=f"expected severity 1 to 5, got {severity}"):
            Shift("fog", severity)
        with pytest.raises(ValueError, match="expected severity"):
            single("fog", severity=severity)
    with pytest.raises(ValueError, match="expected severity 0 for clean data"):
        Shift("clean", 3)
    with pytest.raises(ValueError, match="did you mean 'gradual'"):
        scenario("graduel")
    with pytest.raises(TypeError, match=r"expected labels, got the number 10; Sorted\(\) arranges by class"):
        next(correlated("fog").over(10))
    with pytest.raises(ValueError, match="at least one domain"):
        continual([])
    with pytest.raises(TypeError, match="integer seed"):
        continual(seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch size >= 1"):
        next(next(single("fog").over(4)).cut(0))
    with pytest.raises(ValueError, match="n >= 1"):
        next(single("fog").over(0))
    assert Shift() == CLEAN
    assert LabelShift() == LabelShift(500_000)
    assert isinstance(Segment((CLEAN,), np.zeros(1, np.int64), False, np.zeros(1, np.int64)).shift, Shift)
    assert Visit((CLEAN,)).reset is False
