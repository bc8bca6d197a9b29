"""Selected samples and their weights: masks stay inside the samples given, and a call has no side effect."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from by_hand import adapted, entropy, net, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import make_net
from torch import Tensor
from toys import images

import poem
from poem.parts import (
    Batch,
    ByDiversityAndCertainty,
    ByEntropy,
    ByPLPD,
    Diverse,
    EntropyBelow,
    Equal,
    Everyone,
    FirstRound,
    Memory,
    NotRedundant,
    Occlusion,
    Outputs,
    Patches,
    Pixels,
    PLPDAbove,
    Select,
    Weigh,
)
from poem.parts.base import Outcome, Update, inside, min_max
from poem.parts.destruction import plpd
from poem.recipes.recipe import Recipe

SELECTS: tuple[Select, ...] = (
    Everyone(),
    EntropyBelow(0.4),
    EntropyBelow(0.3, first=0.8),
    NotRedundant(0.7),
    PLPDAbove(0.0),
    PLPDAbove(0.05, Pixels()),
    PLPDAbove(0.0, Occlusion()),
    Diverse(),
    EntropyBelow(0.5) & PLPDAbove(0.0),
    EntropyBelow(0.6) & PLPDAbove(0.0) & NotRedundant(0.8),
    Diverse() & EntropyBelow(0.7),
)
WEIGHS: tuple[Weigh, ...] = (
    Equal(),
    ByEntropy(0.4),
    ByPLPD(),
    ByDiversityAndCertainty(),
    ByEntropy(0.4) + ByPLPD(),
    FirstRound(ByEntropy(0.4)),
)
batches = given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 9),
    classes=st.integers(2, 12),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
)
quick = settings(max_examples=30, deadline=None)


@dataclass
class Model:
    """Answers with a fixed linear map of the pixels, and records the calls."""

    classes: int
    spread: float = 1.0
    asked: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    def __call__(self, images: Tensor, *, among: Tensor | None = None, grad: bool = False, **_: object) -> Tensor:
        self.asked.append((images, among))
        weight = torch.randn(images[0].numel(), self.classes, generator=torch.Generator().manual_seed(7)).to(images)
        return self.spread * images.flatten(1) @ weight / 4


def random_batch(rows: int, seed: int, size: int = 8) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(rows, 3, size, size, generator=rng, dtype=torch.float64), rng, rows)


def random_look(seed: int, rows: int, classes: int, spread: float, round: int = 0) -> Outputs:
    batch, model = random_batch(rows, seed), Model(classes, spread)
    logits = model(batch.images)
    model.asked.clear()
    return Outputs(logits, (logits,), batch, model, round)


def look_of(logits: Tensor, batch: Batch | None = None, round: int = 0) -> Outputs:
    batch = batch or random_batch(len(logits), seed=0)
    return Outputs(logits, (logits,), batch, Model(logits.shape[1]), round)


def some(rows: int, seed: int) -> Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed + 1)) < 0.7


def warmed(part: Select | Weigh, seed: int, classes: int) -> Memory:
    """What a part remembers after a first batch of its own."""
    outputs = random_look(seed + 1, 5, classes, 3.0)
    memory = begun(part, outputs)
    return {**memory, **remembered(part, outputs, torch.ones(5, dtype=torch.bool), memory)}


def begun(part: Select | Weigh, outputs: Outputs) -> Memory:
    """The first memory of a part and of those inside it, each under its place."""
    found = ((place, each.start(outputs)) for place, each in part.places)
    return {f"{place}.{name}".lstrip("."): tensor for place, memory in found for name, tensor in memory.items()}


def remembered(part: Select | Weigh, outputs: Outputs, mask: Tensor, memory: Memory) -> Memory:
    """What a part and those inside it return after a batch with an update on `mask`, or none where that is empty."""
    updates = [Update(outputs, mask, torch.zeros(()), {}, torch.tensor(True))] if mask.any() else []
    outcome, found = Outcome(outputs, outputs, updates, [mask]), Memory()
    for place, each in part.places:
        new = each.remember(outcome, inside(memory, place) if place else memory)
        found |= {f"{place}.{name}".lstrip("."): tensor for name, tensor in new.items()}
    return found


def copied(memory: Memory) -> Memory:
    return {key: value.clone() for key, value in memory.items()}


def assert_same(one: Memory, other: Memory) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


# Every selection ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", SELECTS, ids=repr)
@quick
@batches
def test_only_samples_that_are_still_eligible_are_selected(
    select: Select, seed: int, rows: int, classes: int, spread: float
) -> None:
    for memory in (begun(select, random_look(seed, rows, classes, spread)), warmed(select, seed, classes)):
        among = some(rows, seed)
        mask = select(random_look(seed, rows, classes, spread), among, memory)
        assert mask.shape == (rows,)
        assert mask.dtype == torch.bool
        assert not mask.requires_grad
        assert not bool((mask & ~among).any())
        nobody = torch.zeros(rows, dtype=torch.bool)
        assert not bool(select(random_look(seed, rows, classes, spread), nobody, memory).any())


@pytest.mark.parametrize("select", SELECTS, ids=repr)
@quick
@batches
def test_asking_twice_gives_the_same_and_writes_nothing(
    select: Select, seed: int, rows: int, classes: int, spread: float
) -> None:
    outputs, memory, among = random_look(seed, rows, classes, spread), warmed(select, seed, classes), some(rows, seed)
    before, images, chance = copied(memory), outputs.batch.images.clone(), torch.random.get_rng_state()
    first = select(outputs, among, memory)
    drawn = outputs.batch.rng.get_state()
    again = select(outputs, among, memory)
    other = select(Outputs(outputs.logits, outputs.heads, outputs.batch, outputs.forward), among, memory)
    assert torch.equal(first, again)
    assert torch.equal(first, other)
    assert_same(memory, before)
    assert torch.equal(outputs.batch.images, images)
    assert torch.equal(outputs.batch.rng.get_state(), drawn)
    assert torch.equal(torch.random.get_rng_state(), chance)


@pytest.mark.parametrize("part", [*SELECTS, *WEIGHS], ids=repr)
@quick
@batches
def test_remembering_returns_new_values_and_leaves_the_old(
    part: Select | Weigh, seed: int, rows: int, classes: int, spread: float
) -> None:
    outputs, memory, mask = random_look(seed, rows, classes, spread), warmed(part, seed, classes), some(rows, seed)
    before = copied(memory)
    new = remembered(part, outputs, mask, memory)
    assert_same(memory, before)
    assert new.keys() == begun(part, outputs).keys()
    for key, value in new.items():
        assert value.shape == memory[key].shape
        assert value.dtype == memory[key].dtype
        assert not value.requires_grad
    assert_same(new, remembered(part, outputs, mask, memory))


@dataclass(frozen=True, repr=False)
class Odd(Select):
    """Keeps every other one of those still in question, so that the order of filters shows."""

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among & (among.cumsum(0) % 2 == 1)


@quick
@batches
def test_the_second_filter_sees_what_the_first_kept(seed: int, rows: int, classes: int, spread: float) -> None:
    outputs, among = random_look(seed, rows, classes, spread), some(rows, seed)
    below = EntropyBelow(0.6)
    assert torch.equal((below & Odd())(outputs, among, {}), Odd()(outputs, below(outputs, among, {}), {}))
    assert torch.equal((Odd() & below)(outputs, among, {}), below(outputs, Odd()(outputs, among, {}), {}))
    three = (Odd() & below) & Odd()
    assert torch.equal(three(outputs, among, {}), (Odd() & (below & Odd()))(outputs, among, {}))


def test_the_order_of_filters_matters() -> None:
    logits = torch.tensor([[0.0, 0.0], [9.0, 0.0], [9.0, 0.0], [9.0, 0.0]])
    everyone = torch.ones(4, dtype=torch.bool)
    first = (Odd() & EntropyBelow(0.4))(look_of(logits), everyone, {})
    second = (EntropyBelow(0.4) & Odd())(look_of(logits), everyone, {})
    assert first.tolist() == [False, False, True, False]
    assert second.tolist() == [False, True, False, True]


def test_a_composition_runs_the_network_if_either_does_and_has_one_margin() -> None:
    assert Recipe(select=EntropyBelow(0.5) & PLPDAbove(0.2)).select_runs_network
    assert Recipe(select=PLPDAbove(0.2) & EntropyBelow(0.5)).select_runs_network
    assert not Recipe(select=EntropyBelow(0.5) & NotRedundant(0.05)).select_runs_network
    assert (PLPDAbove(0.2) & EntropyBelow(0.5)).margin == 0.5
    assert (EntropyBelow(0.5) & PLPDAbove(0.2)).with_margin(0.3) == EntropyBelow(0.3) & PLPDAbove(0.2)
    assert PLPDAbove(0.2).margin is None
    assert repr(EntropyBelow(0.5) & PLPDAbove(0.2)) == "EntropyBelow(0.5) & PLPDAbove(0.2)"


# Entropy --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 5, 10, 100, 1000])
@pytest.mark.parametrize("fraction", [0.4, 0.5])
def test_an_entropy_exactly_at_the_threshold_is_not_below_it(fraction: float, classes: int) -> None:
    limit = torch.tensor(fraction * math.log(classes), dtype=torch.float64)
    values = torch.stack([limit, limit.nextafter(torch.tensor(0.0, dtype=torch.float64)), limit + 1e-9])
    outputs = look_of(torch.zeros(3, classes, dtype=torch.float64))
    outputs.__dict__["entropy"] = values
    selected = EntropyBelow(fraction)(outputs, torch.ones(3, dtype=torch.bool), {})
    assert selected.tolist() == [False, True, False]


def test_a_uniform_prediction_is_not_below_the_whole_of_ln_c() -> None:
    outputs = look_of(torch.zeros(1, 2, dtype=torch.float64))
    assert outputs.entropy.item() == math.log(2)
    assert not EntropyBelow(1.0)(outputs, torch.ones(1, dtype=torch.bool), {}).item()


@pytest.mark.parametrize("value", [40.0, 11, -0.1, math.nan, math.inf])
def test_nats_and_percent_are_no_fractions_of_ln_c(value: float) -> None:
    with pytest.raises(ValueError, match=r"expected fraction to be .*got .*fraction of ln C.*EntropyBelow\(0\.4\)"):
        EntropyBelow(value)
    with pytest.raises(ValueError, match="fraction of ln C"):
        EntropyBelow(0.4, first=value)
    with pytest.raises(ValueError, match="fraction of ln C"):
        EntropyBelow(0.4).with_margin(value)


@pytest.mark.parametrize("value", [0.0, 1.0, 2.0, 9.0, 10])
def test_a_fraction_that_keeps_no_sample_or_every_sample_is_allowed(value: float) -> None:
    assert EntropyBelow(value, first=value).margin == value


def test_the_first_fraction_holds_in_the_first_round_only() -> None:
    logits = torch.tensor([[2.2, 0.0]], dtype=torch.float64)  # entropy 0.465 ln 2
    one = torch.ones(1, dtype=torch.bool)
    select = EntropyBelow(0.4, first=0.5)
    assert select(look_of(logits, round=0), one, {}).item()
    assert not select(look_of(logits, round=1), one, {}).item()
    assert not EntropyBelow(0.4)(look_of(logits, round=0), one, {}).item()


@pytest.mark.parametrize(
    "select", [s for s in SELECTS if s not in (Everyone(), NotRedundant(0.7))] + [NotRedundant(1.5)], ids=repr
)
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_sample_is_never_selected(select: Select, broken: float) -> None:
    outputs = random_look(3, 6, 5, 3.0)
    logits = outputs.logits.clone()
    logits[2, 1] = broken
    mask = select(look_of(logits), torch.ones(6, dtype=torch.bool), warmed(select, 3, 5))
    assert not mask[2].item()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_sample_that_is_not_finite_does_not_deselect_others(broken: float) -> None:
    outputs = random_look(3, 6, 5, 3.0)
    logits = outputs.logits.clone()
    logits[2, 1] = broken
    everyone = torch.ones(6, dtype=torch.bool)
    for select in (EntropyBelow(0.7), PLPDAbove(-0.5), EntropyBelow(0.7) & NotRedundant(0.99)):
        memory = warmed(select, 3, 5)
        sound = select(outputs, everyone, memory)
        assert bool(sound[[0, 1, 3, 4, 5]].any())
        sound[2] = False
        assert torch.equal(select(look_of(logits, outputs.batch), everyone, memory), sound)


# Redundancy -----------------------------------------------------------------------------------------------------------


def test_before_the_first_update_no_sample_is_redundant() -> None:
    select, outputs = NotRedundant(1e-6), random_look(0, 6, 5, 3.0)
    among = some(6, 0)
    assert bool(among.any())
    assert torch.equal(select(outputs, among, select.start(outputs)), among)


def test_the_average_begins_with_the_mean_of_the_selected_samples() -> None:
    select, outputs = NotRedundant(0.3), random_look(0, 6, 5, 3.0)
    mask = torch.tensor([True, False, True, False, False, False])
    memory = remembered(select, outputs, mask, select.start(outputs))
    torch.testing.assert_close(memory["mean"], (outputs.probs[0] + outputs.probs[2]) / 2)
    assert memory["seen"].item()


def test_the_average_then_moves_by_a_tenth() -> None:
    select, outputs = NotRedundant(0.3), random_look(0, 6, 5, 3.0)
    memory = warmed(select, 0, 5)
    mask = torch.tensor([False, True, False, False, True, True])
    new = remembered(select, outputs, mask, memory)["mean"]
    torch.testing.assert_close(new, 0.9 * memory["mean"] + 0.1 * outputs.probs[mask].mean(0))


def test_without_selected_samples_the_average_stays() -> None:
    select, outputs, nobody = NotRedundant(0.3), random_look(0, 6, 5, 3.0), torch.zeros(6, dtype=torch.bool)
    start = select.start(outputs)
    assert_same({**start, **remembered(select, outputs, nobody, start)}, start)
    assert not start["seen"].item()
    memory = warmed(select, 0, 5)
    assert_same({**memory, **remembered(select, outputs, nobody, memory)}, memory)


@quick
@batches
def test_redundancy_is_the_cosine_to_the_average(seed: int, rows: int, classes: int, spread: float) -> None:
    select, outputs = NotRedundant(0.6), random_look(seed, rows, classes, spread)
    memory = warmed(select, seed, classes)
    mean = memory["mean"]
    cosines = [float(p @ mean / (p.norm() * mean.norm())) for p in outputs.probs]
    mask = select(outputs, torch.ones(rows, dtype=torch.bool), memory).tolist()
    assert all(kept == (cosine < 0.6) for kept, cosine in zip(mask, cosines, strict=True) if abs(cosine - 0.6) > 1e-9)


# Destroying an image --------------------------------------------------------------------------------------------------


def tiles_of(image: Tensor, grid: int) -> list[Tensor]:
    high, wide = image.shape[1] // grid, image.shape[2] // grid
    cut = range(grid)
    return [image[:, r * high : (r + 1) * high, c * wide : (c + 1) * wide] for r in cut for c in cut]


def permutation(before: Tensor, after: Tensor, grid: int) -> tuple[int, ...]:
    """Which tile of the image stands at each place; fails unless each occurs once."""
    old, new = tiles_of(before, grid), tiles_of(after, grid)
    order = tuple(next(i for i, tile in enumerate(old) if torch.equal(tile, place)) for place in new)
    assert sorted(order) == list(range(grid * grid))
    return order


@pytest.mark.parametrize(("grid", "shape"), [(4, (8, 8)), (2, (6, 10)), (4, (16, 8)), (1, (5, 5))])
def test_patches_keep_every_tile_and_its_content(grid: int, shape: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(0)
    batch = Batch(torch.rand(6, 3, *shape, generator=rng), rng, 6)
    shuffled = Patches(grid)(look_of(torch.zeros(6, 5), batch))
    orders = [permutation(a, b, grid) for a, b in zip(batch.images, shuffled, strict=True)]
    if grid > 1:
        assert len(set(orders)) > 1, "every image is cut alike"
        assert any(order != tuple(range(grid * grid)) for order in orders)


def test_patches_of_a_size_that_does_not_divide_are_resized_and_back() -> None:
    rng = torch.Generator().manual_seed(0)
    batch = Batch(torch.rand(2, 3, 10, 9, generator=rng), rng, 2)
    outputs = look_of(torch.zeros(2, 5), batch)
    fitted = torch.nn.functional.interpolate(batch.images, (8, 8), mode="bilinear", align_corners=False)
    order = batch.once(Patches(4), lambda rng: torch.rand(2, 16, generator=rng).argsort(dim=1))
    rows = [torch.cat([torch.cat([tiles_of(x, 4)[i] for i in o[r : r + 4]], 2) for r in range(0, 16, 4)], 1)
            for x, o in zip(fitted, order.tolist(), strict=True)]  # fmt: skip
    by_hand = torch.nn.functional.interpolate(torch.stack(rows), (10, 9), mode="bilinear", align_corners=False)
    torch.testing.assert_close(Patches(4)(outputs), by_hand)


@pytest.mark.parametrize("destroy", [Patches(4), Pixels()], ids=repr)
def test_a_second_look_at_a_batch_reuses_the_draw_and_the_next_batch_draws_anew(destroy: Patches | Pixels) -> None:
    batch = random_batch(4, seed=0)
    first = destroy(look_of(torch.zeros(4, 5), batch))
    second = destroy(look_of(torch.ones(4, 5), batch, round=1))
    assert torch.equal(first, second)
    following = Batch(batch.images, batch.rng, 4)
    assert not torch.equal(first, destroy(look_of(torch.zeros(4, 5), following)))


def test_pixels_move_in_one_way_for_all_images_and_channels() -> None:
    batch = random_batch(4, seed=0)
    shuffled = Pixels()(look_of(torch.zeros(4, 5), batch)).flatten(2)
    plain = batch.images.flatten(2)
    order = [int((plain[0, 0] == value).nonzero()) for value in shuffled[0, 0]]
    assert sorted(order) == list(range(64))
    assert order != list(range(64))
    assert torch.equal(shuffled, plain[:, :, order])


@pytest.mark.parametrize("size", [8, 10, 16])
def test_occlusion_covers_the_middle_with_the_mean_and_nothing_else(size: int) -> None:
    batch = random_batch(3, seed=0, size=size)
    before = batch.images.clone()
    covered = Occlusion()(look_of(torch.zeros(3, 5), batch))
    assert torch.equal(batch.images, before)
    low, wide = size // 4, size // 2
    middle = covered[:, :, low : low + wide, low : low + wide]
    torch.testing.assert_close(middle, before.mean((2, 3), keepdim=True).expand_as(middle))
    covered[:, :, low : low + wide, low : low + wide] = before[:, :, low : low + wide, low : low + wide]
    assert torch.equal(covered, before)


def test_plpd_is_what_the_predicted_class_loses() -> None:
    outputs = random_look(1, 6, 5, 3.0)
    among = torch.tensor([True, True, False, True, True, False])
    found = plpd(outputs, among, Patches(4))
    destroyed = Model(5, 3.0)(Patches(4)(outputs)).softmax(1)
    for i, label in enumerate(outputs.probs.argmax(1)):
        assert found[i].item() == pytest.approx(float(outputs.probs[i, label] - destroyed[i, label]), abs=1e-12)
    assert isinstance(outputs.forward, Model)
    (images, asked), *rest = outputs.forward.asked
    assert torch.equal(images, Patches(4)(outputs))
    assert asked is not None
    assert torch.equal(asked, among)
    assert rest == []


def test_a_drop_exactly_at_the_threshold_is_not_above_it() -> None:
    outputs = random_look(1, 3, 5, 3.0)
    outputs.cache[Patches(4)] = torch.tensor([0.2, 0.2 + 1e-12, 0.1], dtype=torch.float64)
    assert PLPDAbove(0.2)(outputs, torch.ones(3, dtype=torch.bool), {}).tolist() == [False, True, False]


def test_filter_and_weight_ask_the_network_once_per_look() -> None:
    outputs, everyone = random_look(1, 6, 5, 3.0), torch.ones(6, dtype=torch.bool)
    mask = (EntropyBelow(0.9) & PLPDAbove(-0.5))(outputs, everyone, {})
    (ByEntropy(0.4) + ByPLPD())(outputs, mask, {})
    assert isinstance(outputs.forward, Model)
    assert len(outputs.forward.asked) == 1
    assert torch.equal(outputs.forward.asked[0][1], EntropyBelow(0.9)(outputs, everyone, {}))  # type: ignore[arg-type]


# Diversity ------------------------------------------------------------------------------------------------------------


@quick
@batches
def test_the_diverse_are_those_not_below_the_mean(seed: int, rows: int, classes: int, spread: float) -> None:
    select, outputs = Diverse(), random_look(seed, rows, classes, spread)
    memory = warmed(select, seed, classes)
    mask = select(outputs, torch.ones(rows, dtype=torch.bool), memory)
    assert bool(mask.any()), "the most diverse is never below the mean"
    prior = memory["mean"]
    unlike = torch.stack([1 - p @ prior / (p.norm() * prior.norm()) for p in outputs.probs])
    clear = (unlike - unlike.mean()).abs() > 1e-6
    assert torch.equal(mask[clear], (unlike >= unlike.mean())[clear])


@pytest.mark.parametrize("rows", [1, 4])
def test_where_all_are_equally_diverse_every_sample_is_selected(rows: int) -> None:
    outputs = look_of(torch.tensor([[3.0, 1.0, 0.0]], dtype=torch.float64).expand(rows, 3))
    everyone, select, weigh = torch.ones(rows, dtype=torch.bool), Diverse(), ByDiversityAndCertainty()
    assert torch.equal(select(outputs, everyone, select.start(outputs)), everyone)
    weights = weigh(outputs, everyone, weigh.start(outputs))
    torch.testing.assert_close(weights, torch.full_like(weights, math.exp(3)))


def test_the_prior_begins_uniform_and_averages_unselected_samples_too() -> None:
    outputs, nobody = random_look(0, 6, 5, 3.0), torch.zeros(6, dtype=torch.bool)
    for part in (Diverse(), ByDiversityAndCertainty()):
        start = part.start(outputs)
        torch.testing.assert_close(start["mean"], torch.full((5,), 0.2, dtype=torch.float64))
        expected = 0.9 * 0.2 + 0.1 * outputs.probs.mean(0)
        torch.testing.assert_close(remembered(part, outputs, nobody, start)["mean"], expected)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_min_max_maps_to_the_unit_range_or_to_ones(values: list[float]) -> None:
    given_values = torch.tensor(values, dtype=torch.float64)
    found = min_max(given_values)
    if max(values) - min(values) < 1e-12:
        assert torch.equal(found, torch.ones_like(found))
    else:
        assert found.min() == 0
        assert found.max() == 1
        span = max(values) - min(values)
        torch.testing.assert_close(found, (given_values - min(values)) / span)


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weigh", WEIGHS, ids=repr)
@quick
@batches
def test_weights_are_positive_and_carry_no_gradient(
    weigh: Weigh, seed: int, rows: int, classes: int, spread: float
) -> None:
    outputs = random_look(seed, rows, classes, spread)
    logits = outputs.logits.requires_grad_()
    outputs = Outputs(logits, (logits,), outputs.batch, outputs.forward)
    memory = warmed(weigh, seed, classes)
    before = copied(memory)
    weights = weigh(outputs, torch.ones(rows, dtype=torch.bool), memory)
    assert outputs.entropy.requires_grad, "the entropy itself has a gradient to lose"
    assert weights.shape == (rows,)
    assert not weights.requires_grad
    assert bool((weights > 0).all())
    assert torch.equal(weights, weigh(outputs, torch.ones(rows, dtype=torch.bool), memory))
    assert_same(memory, before)


@quick
@batches
def test_inside_its_margin_a_sample_counts_at_least_one(seed: int, rows: int, classes: int, spread: float) -> None:
    outputs, everyone = random_look(seed, rows, classes, spread), torch.ones(rows, dtype=torch.bool)
    weights = ByEntropy(0.4)(outputs, everyone, {})
    inside = EntropyBelow(0.4)(outputs, everyone, {})
    assert torch.equal(inside, weights > 1)
    by_hand = [math.exp(0.4 * math.log(classes) - float(h)) for h in outputs.entropy]
    torch.testing.assert_close(weights, torch.tensor(by_hand, dtype=torch.float64))


@quick
@batches
def test_weights_by_plpd_lie_between_one_over_e_and_e(seed: int, rows: int, classes: int, spread: float) -> None:
    outputs, everyone = random_look(seed, rows, classes, spread), torch.ones(rows, dtype=torch.bool)
    weights = ByPLPD()(outputs, everyone, {})
    torch.testing.assert_close(weights, plpd(outputs, everyone, Patches()).exp())
    assert bool(((weights >= 1 / math.e) & (weights <= math.e)).all())


def test_weights_by_diversity_and_certainty_follow_the_formula() -> None:
    weigh, outputs = ByDiversityAndCertainty(), random_look(2, 7, 5, 3.0)
    memory = warmed(weigh, 2, 5)
    prior = memory["mean"]
    unlike = torch.stack([1 - p @ prior / (p.norm() * prior.norm()) for p in outputs.probs])
    diverse = (unlike - unlike.min()) / (unlike.max() - unlike.min())
    sure = (outputs.entropy.max() - outputs.entropy) / (outputs.entropy.max() - outputs.entropy.min())
    weights = weigh(outputs, torch.ones(7, dtype=torch.bool), memory)
    torch.testing.assert_close(weights, (3 * diverse * sure).exp())


def test_weights_add_up() -> None:
    outputs, everyone = random_look(2, 7, 5, 3.0), torch.ones(7, dtype=torch.bool)
    both = (ByEntropy(0.4) + ByPLPD())(outputs, everyone, {})
    torch.testing.assert_close(both, ByEntropy(0.4)(outputs, everyone, {}) + ByPLPD()(outputs, everyone, {}))
    assert repr(ByEntropy(0.3) + Equal()) == "ByEntropy(0.3) + Equal()"


def test_weights_of_the_first_round_are_equal_afterwards() -> None:
    first, later = (random_look(2, 7, 5, 3.0, round=r) for r in (0, 1))
    everyone, weigh = torch.ones(7, dtype=torch.bool), FirstRound(ByEntropy(0.4))
    assert torch.equal(weigh(first, everyone, {}), ByEntropy(0.4)(first, everyone, {}))
    assert torch.equal(weigh(later, everyone, {}), torch.ones(7, dtype=torch.float64))


@pytest.mark.parametrize("method", ["tent-filtered", "sar", "poem", "eta"])
def test_thresholds_follow_the_classes_that_are_left(method: str) -> None:
    (batch, *_) = stream()
    kept = [0, 2, 3, 5, 8]
    logits = net("gn")(batch).detach()[:, kept]
    adapter = adapted("gn", method, classes=kept)
    answer = adapter(batch)
    assert answer.shape == (12, 5)
    expected = entropy(logits) < 0.4 * math.log(5)
    assert torch.equal(adapter.last.selected, expected)
    for wrong in (10, 1000):
        assert not torch.equal(expected, entropy(logits) < 0.4 * math.log(wrong))


@pytest.mark.parametrize("classes", [3, 5, 10, 100, 200, 1000])
def test_thresholds_know_no_number_of_classes_by_heart(classes: int) -> None:
    model = make_net("gn", classes=classes, sharpness=8.0).double()
    batch = images(24, seed=3).double()
    expected = entropy(model(batch)).detach()
    between = float(expected.sort().values[11:13].mean())  # as many below as above
    adapter = poem.adapt(model, "poem", threshold=between / math.log(classes))
    adapter(batch)
    assert torch.equal(adapter.last.selected, expected < between)
    assert int(adapter.last.selected.sum()) == 12
