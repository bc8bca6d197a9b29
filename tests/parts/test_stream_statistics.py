"""Statistics that follow the stream: their equations by hand, their limits, copies, masks and memory."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import net, with_batch_statistics
from inside import network
from nets import make_net
from torch import Tensor, nn
from toys import images

import poem
from poem.parts import Blended, Components, Everyone, FromBatch, Memory, Nothing, Significant, Source, Statistics
from poem.parts.runs import shared_runs
from poem.parts.statistics import moments
from poem.parts.stream_statistics import mixture

KEY = "statistics.norm"
EPS = 1e-5


@dataclass
class Layer:
    """A batch-norm layer without scale and shift that keeps the statistics it was given."""

    source_mean: Tensor | None
    source_var: Tensor | None
    learning: bool = False
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def with_source(self, x: Tensor) -> Tensor:
        assert self.source_mean is not None
        assert self.source_var is not None
        return self.with_moments(x, self.source_mean, self.source_var)

    def with_batch(self, x: Tensor) -> Tensor:
        return self.with_moments(x, *moments(x, None))

    def with_moments(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        self.given.append((mean, var))
        if mean.dim() == 2:
            pieces = zip(x.chunk(len(mean)), mean, var, strict=True)
            return torch.cat([normal(*piece) for piece in pieces])
        return normal(x, mean, var)


def normal(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    shape = (1, -1, *[1] * (x.dim() - 2))
    return (x - mean.view(shape)) / (var.view(shape) + EPS).sqrt()


def layer(channels: int = 3) -> Layer:
    return Layer(torch.linspace(-1, 1, channels).double(), torch.linspace(0.5, 2, channels).double())


def draw(count: int, seed: int, *, shift: float = 0.0, like: Layer | None = None, size: int = 4) -> Tensor:
    """Images (count, channels, size, size) with the statistics of a layer's source, moved by standard deviations."""
    like = like or layer()
    assert like.source_mean is not None
    assert like.source_var is not None
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, len(like.source_mean), size, size, generator=rng, dtype=torch.float64)
    deviation = like.source_var.sqrt()[:, None, None]
    return like.source_mean[:, None, None] + deviation * (noise + shift)


def called(statistics: Statistics, on: Layer, x: Tensor, memory: Memory, mask: Tensor | None = None) -> Tensor:
    """One batch, as the engine runs it: copies, the answer, and then the memory."""
    repeated = x.repeat(statistics.copies, *[1] * (x.dim() - 1))
    new = statistics.remember_layer(on, repeated, mask, memory, KEY)
    found = statistics(on, repeated, mask, memory, KEY)
    memory.update(new)
    return found


def adapted(statistics: Statistics, model: nn.Module | None = None, **changes: Any) -> poem.Adapter:
    """An adapter that changes nothing but the statistics."""
    settings: dict[str, Any] = {"parameters": Nothing(), "statistics": statistics, **changes}
    return poem.adapt(net("bn") if model is None else model, "bn", guard=False, **settings)


def batch(count: int = 64, seed: int = 1) -> Tensor:
    return images(count, seed=seed).double()


# The mixture ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("few", "many"), [(3, 9), (10, 10), (1, 7), (5, 0), (0, 5)])
def test_a_mixture_has_the_moments_of_both_sets_together(few: int, many: int) -> None:
    rng = torch.Generator().manual_seed(0)
    one = torch.randn(few, 4, generator=rng, dtype=torch.float64)
    other = 3 + 2 * torch.randn(many, 4, generator=rng, dtype=torch.float64)

    def of(values: Tensor) -> tuple[Tensor, Tensor]:
        return (values.mean(0), values.var(0, correction=0)) if len(values) else (torch.zeros(4), torch.ones(4))

    mean, var = mixture(*of(one), *of(other), many / (few + many))
    both = torch.cat([one, other])
    torch.testing.assert_close(mean, both.mean(0))
    torch.testing.assert_close(var, both.var(0, correction=0))


# Blended --------------------------------------------------------------------------------------------------------------


def test_a_copy_of_weight_0_is_the_source() -> None:
    adapter, model = adapted(Blended((0.0,), (1.0,), (3.0,))), net("bn")
    for seed in (1, 2):
        expected = model(batch(seed=seed)).log_softmax(1)
        torch.testing.assert_close(adapter(batch(seed=seed)).log_softmax(1), expected, rtol=1e-5, atol=1e-5)


def test_a_copy_of_weight_1_and_rate_1_without_doubt_has_the_statistics_of_the_batch() -> None:
    """The variance is the biased one, as in training mode; smaller batches than 64 images count less."""
    statistics = Blended((1.0,), (1.0,), (0.0,), trust=0.0)
    adapter, reference = adapted(statistics), with_batch_statistics(net("bn"))
    for seed in (1, 2):
        expected = reference(batch(64, seed)).log_softmax(1)
        torch.testing.assert_close(adapter(batch(64, seed)).log_softmax(1), expected, rtol=1e-5, atol=1e-5)
    small = adapted(statistics)(batch(8)).log_softmax(1)
    assert (small - reference(batch(8)).log_softmax(1)).abs().max() > 0.1


def test_copies_answer_with_the_weighted_mean_of_their_probabilities() -> None:
    settings: dict[str, Any] = {"trust": 2.0, "caution": 0.0}
    pairs = ((0.0, 1.0), (0.3, 1.0), (1.0, 0.5))
    model = make_net("bn", sharpness=300.0).double()
    weights, rates = ((*each,) for each in zip(*pairs, strict=True))
    together = adapted(Blended(weights, rates, (0.0,) * 3, **settings), model)
    alone = [adapted(Blended((weight,), (rate,), (0.0,), **settings), model) for weight, rate in pairs]
    probs = torch.stack([each(batch()).softmax(1) for each in alone])
    means = probs.mean(1)
    information = -(means * means.log()).sum(1) + (probs * probs.log()).sum(2).mean(1)
    assert information.max() - information.min() > 0.05  # so the copies' weights differ
    trusted = (2 * information / math.log(probs.shape[-1])).softmax(0)
    expected = (trusted[:, None, None] * probs).sum(0)
    torch.testing.assert_close(together(batch()), expected.log(), rtol=1e-5, atol=1e-5)
    assert (expected - probs.mean(0)).abs().max() > 1e-3


def test_without_trust_all_copies_count_the_same() -> None:
    statistics = Blended((0.0, 1.0), (1.0, 1.0), (3.0, 3.0), trust=0.0)
    logits = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    answer, _ = statistics.combine(logits, {})
    torch.testing.assert_close(answer, logits.softmax(-1).mean(0).log())


def test_copies_are_weighted_by_what_was_seen_over_the_horizon() -> None:
    statistics = Blended((0.0, 1.0), (1.0, 1.0), (3.0, 3.0), trust=1.0, horizon=20)
    rng = torch.Generator().manual_seed(0)
    sharp = [torch.stack([torch.randn(10, 4, generator=rng), torch.randn(10, 4, generator=rng) * 5]) for _ in range(2)]
    answer, memory = statistics.combine(sharp[0], {})
    assert float(memory["statistics.seen"]) == 10
    answer, memory = statistics.combine(sharp[1], memory)
    probs = torch.cat(sharp, 1).softmax(-1)  # 20 images are within the horizon, so this is over all
    means = probs.mean(1)
    information = -(means * means.log()).sum(1) + (probs * probs.log()).sum(2).mean(1)
    weights = (information / math.log(4)).softmax(0)
    expected = (weights[:, None, None] * sharp[1].softmax(-1)).sum(0)
    torch.testing.assert_close(answer, expected.log())
    assert float(memory["statistics.seen"]) == 20


@pytest.mark.parametrize(("sharpness", "below"), [(1.0, True), (4.5, False)])
def test_the_copy_closest_to_the_batch_has_a_bonus_that_lifts_it_to_the_best_at_most(
    sharpness: float, below: bool
) -> None:
    """By hand: ten classes, one image of each; the source's copy is nearly sure of each, the closest one less so."""
    statistics = Blended((0.0, 1.0), (1.0, 1.0), (0.0, 0.0), trust=10.0, bonus=1.0, caution=0.0)
    logits = torch.stack([5.0 * torch.eye(10), sharpness * torch.eye(10)])
    information = [math.log(10) - float(-(p * p.log()).sum(1).mean()) for p in logits.softmax(-1)]
    score = [10 * each / math.log(10) for each in information]
    weight = 1 / (1 + math.exp(min(score[1] + 1.0, score[0]) - score[0]))
    assert (score[1] + 1.0 < score[0]) == below  # with its bonus
    answer, _ = statistics.combine(logits, {})
    probs = logits.softmax(-1)
    torch.testing.assert_close(answer.exp(), weight * probs[0] + (1 - weight) * probs[1])


def test_large_doubt_is_the_source() -> None:
    adapter, model = adapted(Blended(doubts=(1e12,) * 5, trust=0.0)), net("bn")
    for seed in (1, 2, 3):
        expected = model(batch(seed=seed)).log_softmax(1)
        torch.testing.assert_close(adapter(batch(seed=seed)).log_softmax(1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [64, 8, 1])
def test_a_stream_like_the_source_gets_nearly_its_statistics_and_a_shifted_one_does_not(size: int) -> None:
    statistics = Blended((1.0, 1.0), (1.0, 0.2), (3.0, 3.0))
    for shift in (0.0, 2.0):
        on = layer()
        memory = statistics.start_layer(KEY, on)
        for seed in range(512 // size):
            called(statistics, on, draw(size, seed, shift=shift), memory)
        assert on.source_mean is not None
        assert on.source_var is not None
        moves = (on.given[-1][0] - on.source_mean) / on.source_var.sqrt()
        if shift:
            assert moves[0].min() > 1.0
        else:
            assert moves.abs().max() < 0.02


def test_images_one_by_one_have_errors_from_how_they_differ() -> None:
    """A single image has no spread; the variance between images is that of their successive differences."""
    statistics, on = Blended((1.0,), (1.0,), (3.0,)), layer()
    memory = statistics.start_layer(KEY, on)
    spread = torch.linspace(-1, 1, 200).double()[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    first = called(statistics, on, draw(1, 0) + spread[0], memory)
    torch.testing.assert_close(first, on.with_source(draw(1, 0) + spread[0]))  # its error is unknown
    estimates = []
    for place in range(1, 200):
        called(statistics, on, draw(1, place) + spread[place], memory)
        estimates.append(memory[f"{KEY}.mean_moves"])
    assert on.source_var is not None
    true = spread.var() + on.source_var / 16  # of 4 x 4 pixels each
    torch.testing.assert_close(torch.stack(estimates[20:]).mean(0)[0], true, rtol=0.3, atol=0.0)


def test_smaller_batches_move_the_average_less() -> None:
    statistics, moved = Blended((1.0,), (0.5,), (3.0,)), {}
    for size in (64, 32, 16, 256):
        on = layer()
        memory = statistics.start_layer(KEY, on)
        called(statistics, on, draw(size, 0, shift=1.0), memory)
        (mean, _), source = moments(draw(size, 0, shift=1.0), None), on.source_mean
        assert source is not None
        moved[size] = ((memory[f"{KEY}.mean"][0] - source) / (mean - source)).tolist()
    assert moved[64] == pytest.approx([0.5] * 3)
    assert moved[32] == pytest.approx([0.25] * 3)
    assert moved[16] == pytest.approx([0.125] * 3)
    assert moved[256] == pytest.approx([1.0] * 3)


def test_an_average_over_the_stream_has_a_smaller_error_than_a_batch() -> None:
    """Of a rate r its variance is r^2 of a batch's after the first of 64, and tends to r / (2 - r)."""
    statistics, on = Blended((1.0,), (0.5,), (1.0,)), Layer(torch.zeros(1).double(), torch.ones(1).double())
    memory, batch = statistics.start_layer(KEY, on), torch.tensor([[2.0], [4.0]]).double().repeat(32, 1)
    called(statistics, on, batch, memory)
    assert float(on.given[-1][0]) == pytest.approx(0.5 * 3 - math.sqrt(1 / 63 * 0.5**2))
    for _ in range(20):
        called(statistics, on, batch, memory)
    assert float(memory[f"{KEY}.share"]) == pytest.approx(0.5 / 1.5)


@pytest.mark.parametrize("size", [64, 8, 1])
def test_at_the_start_an_average_is_that_of_all_images_and_the_source(size: int) -> None:
    """The source counts as so many images, until the copy's own rate is the larger one."""
    statistics, on = Blended((1.0,), (0.05,), (0.0,), source_images=256), layer()
    memory, images = statistics.start_layer(KEY, on), draw(512, 0, shift=1.0)
    for batch in images.split(size):
        called(statistics, on, batch, memory)
    assert on.source_mean is not None
    every = (256 * on.source_mean + 512 * images.mean((0, 2, 3))) / (256 + 512)
    torch.testing.assert_close(memory[f"{KEY}.mean"][0], every)
    assert float(memory[f"{KEY}.share"]) == pytest.approx(512 / size * (size / 768) ** 2)
    for batch in draw(1600, 1, shift=1.0).split(64):
        called(statistics, on, batch, memory)
    before = memory[f"{KEY}.mean"][0]
    called(statistics, on, draw(64, 2, shift=2.0), memory)
    moved = before + 0.05 * (draw(64, 2, shift=2.0).mean((0, 2, 3)) - before)
    torch.testing.assert_close(memory[f"{KEY}.mean"][0], moved)


def test_significance_by_hand() -> None:
    """Two images of one pixel, one channel: mean 3, its squared error 1; the source has mean 0 and variance 1."""
    statistics = Blended((1.0,), (1.0,), (2.0,))
    on = Layer(torch.zeros(1).double(), torch.ones(1).double())
    memory = statistics.start_layer(KEY, on)
    x = torch.tensor([[2.0], [4.0]]).double().repeat(32, 1)  # 64 images, so the rate is 1
    called(statistics, on, x, memory)
    error = 1 / 63
    assert float(memory[f"{KEY}.mean_moves"]) == pytest.approx(error)
    assert float(memory[f"{KEY}.var_moves"]) == pytest.approx(0, abs=1e-9)
    assert float(on.given[-1][0]) == pytest.approx(3 - 2 * math.sqrt(error))
    assert float(on.given[-1][1]) == pytest.approx(1)
    called(statistics, on, x + 1, memory)  # a jump of 1: its square, halved, is more than 9 errors
    expected = error + 0.1 * (9 * error - error)
    assert float(memory[f"{KEY}.mean_moves"]) == pytest.approx(expected)
    assert float(on.given[-1][0]) == pytest.approx(4 - 2 * math.sqrt(expected))


# Masks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistics", [Blended(), Blended((1.0,), (1.0,), (0.0,)), Significant(1.0), Components(4)])
@pytest.mark.parametrize("count", [40, 2, 1])
def test_a_masked_pass_equals_the_pass_over_the_kept_rows(statistics: Statistics, count: int) -> None:
    on = layer()
    masked, alone = (statistics.start_layer(KEY, on) for _ in range(2))
    for seed in (0, 1):
        mask = torch.zeros(50, dtype=torch.bool)
        mask[torch.randperm(50, generator=torch.Generator().manual_seed(seed))[:count]] = True
        x = draw(50, seed, shift=0.5)
        x[~mask] += 100
        found = called(statistics, on, x, masked, mask).chunk(statistics.copies)
        expected = called(statistics, on, x[mask], alone).chunk(statistics.copies)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[mask], other)
        assert masked.keys() == alone.keys()
        for key, value in masked.items():
            torch.testing.assert_close(value, alone[key])


@pytest.mark.parametrize("statistics", [Blended(), Significant(), Components(4)])
def test_a_mask_that_keeps_none_leaves_the_memory_and_the_source(statistics: Statistics) -> None:
    on = layer()
    memory = statistics.start_layer(KEY, on)
    called(statistics, on, draw(64, 0, shift=1.0), memory)
    before = {key: value.clone() for key, value in memory.items()}
    found = called(statistics, on, draw(64, 1, shift=1.0), memory, torch.zeros(64, dtype=torch.bool))
    assert found.isfinite().all()
    assert memory.keys() == before.keys()
    for key, value in memory.items():
        torch.testing.assert_close(value, before[key])


def test_a_masked_pass_through_a_network_equals_the_pass_over_the_kept_images() -> None:
    statistics = Blended(trust=0.0, doubts=(1.0,) * 5)
    adapter = adapted(statistics)
    adapter(batch())
    memory = dict(adapter._state.memory)
    kept = torch.arange(64) % 3 == 0
    inner = network(adapter)
    with torch.no_grad(), inner.borrowed("cpu"):
        (masked,), _ = inner.heads(batch(seed=2), None, None, statistics, memory, kept)
        (alone,), _ = inner.heads(batch(seed=2)[kept], None, None, statistics, memory)
        (whole,), _ = inner.heads(batch(seed=2), None, None, statistics, memory)
    torch.testing.assert_close(masked[kept], alone)
    assert (masked - whole)[kept].abs().max() > 1e-3


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistics", [Blended(), Components(4)])
def test_memory_is_saved_loaded_and_reset(statistics: Statistics, tmp_path: Path) -> None:
    adapter, other = adapted(statistics), adapted(statistics)
    fresh = adapter(batch(seed=1))
    adapter(batch(seed=2))
    adapter.save(tmp_path / "state")
    other.load(tmp_path / "state")
    expected = adapter(batch(seed=3))
    assert torch.equal(other(batch(seed=3)), expected)
    adapter.reset()
    assert (adapter(batch(seed=3)) - expected).abs().max() > 1e-3
    adapter.reset()
    assert torch.equal(adapter(batch(seed=1)), fresh)


@pytest.mark.parametrize("statistics", [Blended(), Components(4)])
def test_a_call_while_frozen_remembers_nothing(statistics: Statistics) -> None:
    adapter, other = adapted(statistics), adapted(statistics)
    for each in (adapter, other):
        each(batch(seed=1))
    with adapter.frozen():
        adapter(batch(seed=2))
    assert torch.equal(adapter(batch(seed=3)), other(batch(seed=3)))


@pytest.mark.parametrize("statistics", [Blended(), Significant(), Components(4)])
def test_memory_of_half_networks_is_in_single_precision_from_the_start(statistics: Statistics) -> None:
    dtype = torch.bfloat16
    model = net("bn").to(dtype)
    adapter, single = adapted(statistics, model), adapted(statistics, copy.deepcopy(model).float())
    for seed in (1, 2):
        answer = adapter(batch(seed=seed).to(dtype)).softmax(1)
        expected = single(batch(seed=seed).to(dtype).float()).softmax(1)
        assert (answer - expected).abs().mean() < 0.05
        kinds = {value.dtype for key, value in adapter._state.memory.items() if key.startswith("statistics.")}
        assert kinds <= {torch.float32}


@pytest.mark.parametrize("statistics", [Blended((1.0,), (1.0,), (0.0,)), Significant(0.0), Components(4)])
def test_layers_without_source_statistics_use_the_batch(statistics: Statistics) -> None:
    on = Layer(None, None)
    assert statistics.start_layer(KEY, on) == {}
    x = draw(8, 0)
    torch.testing.assert_close(called(statistics, on, x, {}), on.with_batch(x))


def test_every_copy_needs_a_weight_a_rate_and_a_doubt() -> None:
    with pytest.raises(ValueError, match=r"rates and doubts as weights, .*, got 2 weights, 1 rates and 2 doubts"):
        Blended((0.0, 1.0), (1.0,), (0.0, 0.0))
    with pytest.raises(ValueError, match="got 0 weights, 0 rates and 0 doubts"):
        Blended((), (), ())


# Significant ----------------------------------------------------------------------------------------------------------


def test_where_nothing_deviates_significant_is_exactly_the_source() -> None:
    """Ten standard errors are more than chance gives."""
    on, statistics = layer(), Significant(10.0)
    x = draw(64, 0)
    found = statistics(on, x, None, {}, KEY)
    assert on.source_mean is not None
    assert on.source_var is not None
    mean, var = on.given[-1]
    assert torch.equal(mean, on.source_mean)
    assert torch.equal(var, on.source_var)
    assert torch.equal(found, on.with_source(x))


def test_a_single_image_is_normalised_as_by_the_source() -> None:
    adapter, model = adapted(Significant()), net("bn")
    for seed in (1, 2):
        assert torch.equal(adapter(batch(1, seed)), model(batch(1, seed)))
    assert not torch.equal(adapter(batch(2)), model(batch(2)))


def test_significant_by_hand() -> None:
    """Per-image means 2 and 4, four pixels each: mean 3, squared error of the mean 1; deviations 1 are 1 image's."""
    on = Layer(torch.zeros(1).double(), torch.ones(1).double())
    x = torch.tensor([[1.0, 3.0], [4.0, 4.0]]).double()[:, None]
    # About the mean of 3: squares (4, 0) and (1, 1), so 2 and 1 for the images: variance 1.5, squared error 0.25.
    Significant(0.5)(on, x, None, {}, KEY)
    mean, var = on.given[-1]
    assert float(mean) == pytest.approx(3 - 0.5 * 1)
    assert float(var) == pytest.approx(1.5 - 0.5 * 0.5)
    Significant(4.0)(on, x, None, {}, KEY)
    assert [float(each) for each in on.given[-1]] == [0.0, 1.0]


def test_without_doubt_significant_has_the_statistics_of_the_batch() -> None:
    adapter, reference = adapted(Significant(0.0)), with_batch_statistics(net("bn"))
    torch.testing.assert_close(adapter(batch(8)), reference(batch(8)), rtol=1e-5, atol=1e-5)


# Components -----------------------------------------------------------------------------------------------------------


def test_components_by_hand() -> None:
    """Two components, two channels, one image of two pixels, in plain Python."""
    statistics = Components(2, temperature=0.5, momentum=0.2)
    on = Layer(torch.zeros(2).double(), torch.ones(2).double())
    means, variances = [[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [0.5, 2.0]]
    memory = {f"{KEY}.mean": torch.tensor(means).double(), f"{KEY}.var": torch.tensor(variances).double()}
    x = torch.tensor([[[2.0, 4.0], [3.0, 5.0]]]).double()  # means 3 and 4, variances 1 and 1
    mean, var = [3.0, 4.0], [1.0, 1.0]
    cosines = [3 / 5, 4 / 5]
    scores = [math.exp(each / 0.5) for each in cosines]
    share = [each / sum(scores) for each in scores]
    found = called(statistics, on, x, memory)
    rate = 1 - 0.8 ** (1 / 64)
    for channel in range(2):
        m = [(1 - share[k]) * means[k][channel] + share[k] * mean[channel] for k in range(2)]
        v = [(1 - share[k]) * variances[k][channel] + share[k] * var[channel] for k in range(2)]
        middle = sum(m) / 2
        spread = sum(v) / 2 + sum(each * each for each in m) / 2 - middle**2
        assert float(on.given[-1][0][0, channel]) == pytest.approx(middle)
        assert float(on.given[-1][1][0, channel]) == pytest.approx(spread)
        expected = (x[0, channel] - middle) / math.sqrt(spread + EPS)
        torch.testing.assert_close(found[0, channel], expected)
        for k in range(2):
            moved = means[k][channel] + rate * share[k] * (mean[channel] - means[k][channel])
            assert float(memory[f"{KEY}.mean"][k, channel]) == pytest.approx(moved)
            moved = variances[k][channel] + rate * share[k] * (var[channel] - variances[k][channel])
            assert float(memory[f"{KEY}.var"][k, channel]) == pytest.approx(moved)


def test_an_image_does_not_depend_on_the_rest_of_its_batch() -> None:
    statistics = Components()
    together, alone = adapted(statistics)(batch(8)), [adapted(statistics)(batch(8)[i : i + 1]) for i in range(8)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-9, atol=1e-9)
    assert (together - net("bn")(batch(8))).abs().max() > 1e-3


def test_components_start_about_the_source_and_the_same_each_time() -> None:
    statistics, on = Components(4000), layer()
    memory = statistics.start_layer(KEY, on)
    mean, var = memory[f"{KEY}.mean"], memory[f"{KEY}.var"]
    torch.testing.assert_close(mean.mean(0), on.source_mean, rtol=0, atol=0.1)
    torch.testing.assert_close(var.mean(0) + mean.var(0), on.source_var, rtol=0.1, atol=0)
    assert torch.equal(statistics.start_layer(KEY, on)[f"{KEY}.mean"], mean)
    assert torch.equal(statistics.start_layer(f"branch.{KEY}", on)[f"branch.{KEY}.mean"], mean)
    assert not torch.equal(statistics.start_layer(f"{KEY}2", on)[f"{KEY}2.mean"], mean)


@pytest.mark.parametrize("size", [64, 16])
def test_components_follow_the_stream_by_momentum(size: int) -> None:
    """Where all images are alike and belong to all components alike, M = 1 - 0.9^(B / 64) of half the way."""
    statistics = Components(2, temperature=1e6)
    on = layer()
    memory = statistics.start_layer(KEY, on)
    before, image = memory[f"{KEY}.mean"], draw(1, 0)
    called(statistics, on, image.expand(size, -1, -1, -1), memory)
    share = (memory[f"{KEY}.mean"] - before) / (image.mean((0, 2, 3)) - before)
    torch.testing.assert_close(share, torch.full_like(share, 0.5 * (1 - 0.9 ** (size / 64))), rtol=1e-4, atol=0)


def test_components_far_from_0_have_a_variance_of_at_least_0() -> None:
    statistics = Components(4)
    on = Layer(torch.full((2,), 3e4), torch.full((2,), 1e-4))
    memory = statistics.start_layer(KEY, on)
    x = 3e4 + torch.linspace(0, 1, 300).view(50, 2, 3, 1)
    called(statistics, on, x, memory)
    mean, var = memory[f"{KEY}.mean"], on.given[-1][1]
    assert (var >= 0).all()
    assert (var < 1).all()
    assert mean.isfinite().all()


# Copies in the engine -------------------------------------------------------------------------------------------------


class NormAndActivation(nn.BatchNorm2d):
    """Batch norm with an activation inside, as in some model libraries."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(super().forward(x))


class Small(nn.Module):
    """Two batch-norm layers whose activation is inside them or beside them."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = inside
        kind = NormAndActivation if inside else nn.BatchNorm2d
        self.conv1, self.norm1 = nn.Conv2d(3, 6, 3), kind(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 6, 3), kind(6)
        self.head = nn.Linear(6, 4)
        for norm in (self.norm1, self.norm2):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2)):
            x = norm(conv(x))
            x = x if self.inside else nn.functional.silu(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


@pytest.mark.parametrize("statistics", [Blended(doubts=(0.5,) * 5), Components(4)])
@pytest.mark.parametrize("method", ["bn", "tent"])
def test_an_activation_inside_a_batch_norm_runs_in_every_copy(statistics: Statistics, method: str) -> None:
    """Such a layer runs its own forward for each copy; a plain one takes all copies at once."""
    answers, tensors = [], []
    for inside in (True, False):
        with torch.random.fork_rng(devices=[]):
            model = Small(inside).double().eval()
        adapter = poem.adapt(model, method, statistics=statistics, lr=0.1)
        answers.append(torch.cat([adapter(batch(8, seed)) for seed in (1, 2, 3)]))
        tensors.append({k: v for k, v in adapter.state_dict()["tensors"].items() if k.startswith("moved/")})
    torch.testing.assert_close(*answers, rtol=1e-8, atol=1e-8)
    assert tensors[0].keys() == tensors[1].keys()
    for key, value in tensors[0].items():
        torch.testing.assert_close(value, tensors[1][key], rtol=1e-8, atol=1e-8)


def test_scale_and_shift_get_gradients_through_all_copies() -> None:
    """Through copies of fixed statistics the gradient is that of the mean over plain networks, one for each copy."""
    weights = (0.0, 0.4, 1.0)
    statistics = Blended(weights, (1.0,) * 3, (0.0,) * 3, trust=0.0)
    model, x = Small(inside=False).double().eval(), batch(64)
    adapter = poem.adapt(model, "tent", statistics=statistics, lr=0.0)
    inner = network(adapter)
    theta = inner.source()["theta"].clone().requires_grad_()
    memory = dict(adapter._state._statistics())
    with inner.borrowed("cpu"):
        (answer,), run = inner.heads(x, theta, None, statistics, memory)
        chosen = answer[:, 1].sum()
    (found,) = torch.autograd.grad(chosen, theta)
    by_hand = copy.deepcopy(model).requires_grad_(True)
    named = dict(by_hand.named_parameters())
    probs = []
    for copy_index in range(3):
        norms = {name: module for name, module in by_hand.named_modules() if isinstance(module, nn.BatchNorm2d)}
        source = {name: (norm.running_mean, norm.running_var) for name, norm in norms.items()}
        buffers: dict[str, Tensor] = {}
        for name, (mean, var) in source.items():
            assert mean is not None
            assert var is not None
            seen, spread = (run.record[f"statistics.{name}.{moment}"][copy_index] for moment in ("mean", "var"))
            mixed = mixture(mean, var, seen, spread, weights[copy_index])
            buffers |= dict(zip((f"{name}.running_mean", f"{name}.running_var"), mixed, strict=True))
        probs.append(torch.func.functional_call(by_hand, {**named, **buffers}, (x,)).softmax(1))
    expected_answer = torch.stack(probs).mean(0).log()
    torch.testing.assert_close(answer, expected_answer, rtol=1e-8, atol=1e-8)
    names = inner.theta.named(theta).keys()
    gradients = torch.autograd.grad(expected_answer[:, 1].sum(), [named[name] for name in names])
    for (name, value), expected in zip(inner.theta.named(found).items(), gradients, strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(value.view_as(expected), expected, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("statistics", [Blended(), Components(4), Significant()])
@pytest.mark.parametrize("method", ["tent", "tent+poem"])
def test_methods_learn_with_them(statistics: Statistics, method: str) -> None:
    adapter = poem.adapt(net("bn"), method, statistics=statistics, select=Everyone(), lr=0.05)
    for seed in (1, 2):
        assert adapter(batch(16, seed)).isfinite().all()
    assert adapter.totals.updates > 0


@pytest.mark.parametrize("statistics", [Blended(), Components(4), Significant()])
def test_a_teacher_keeps_them_too_and_they_are_saved(statistics: Statistics) -> None:
    model = net("bn")
    unit: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1)}
    adapter, other = (poem.adapt(model, "rotta", statistics=statistics, lr=0.05, **unit) for _ in range(2))
    for seed in (1, 2, 3):
        assert adapter(batch(64, seed).clamp(0, 1)).isfinite().all()
    assert adapter.totals.updates > 0
    other.load_state_dict(adapter.state_dict())
    last = batch(64, 4).clamp(0, 1)
    assert torch.equal(adapter(last), other(last))


def test_a_batch_whose_answers_are_not_finite_leaves_no_trace() -> None:
    adapter, other = adapted(Blended()), adapted(Blended())
    for each in (adapter, other):
        each(batch(seed=1))
    broken = batch(seed=2)
    broken[3] *= 1e200  # its square overflows
    assert not adapter(broken)[3].isfinite().all()
    assert torch.equal(adapter(batch(seed=3)), other(batch(seed=3)))


def test_an_image_whose_variance_overflows_leaves_components_finite() -> None:
    adapter = adapted(Components(4))
    broken = batch(seed=2)
    broken[3] *= 1e200
    adapter(broken)
    held = {key: value for key, value in adapter.state_dict()["tensors"].items() if "norm1" in key}
    assert held
    assert all(value.isfinite().all() for value in held.values())


def test_source_and_batch_are_the_limits() -> None:
    """Blended between both: as Source, and as FromBatch, in one batch of two copies."""
    adapter = adapted(Blended((0.0, 1.0), (1.0, 1.0), (0.0, 0.0), trust=0.0))
    limits = [adapted(each)(batch()).softmax(1) for each in (Source(), FromBatch())]
    torch.testing.assert_close(adapter(batch()).softmax(1), (limits[0] + limits[1]) / 2, rtol=1e-5, atol=1e-6)


def test_a_sudden_collapse_of_the_slowest_copy_is_no_run_of_a_class() -> None:
    """Five copies; from the third batch on the source's and the slowest answer one class, the others every class."""
    rng = torch.Generator().manual_seed(0)
    statistics, memory, weights = Blended(), dict[str, Tensor](), {}
    for order in ("mixed", "sorted"):
        memory = {}
        for number in range(8):
            truth = torch.randint(10, (64,), generator=rng) if order == "mixed" else torch.full((64,), number)
            right, one = 8.0 * nn.functional.one_hot(truth, 10).double(), torch.zeros(64, 10).double()
            one[:, 3] = 8.0
            copies = [one, one, right, right, one] if order == "mixed" and number > 1 else [right] * 5
            answer, memory = statistics.combine(torch.stack(copies), memory)
            if number == 4:  # the third batch after the shift
                weights[order] = float(answer.exp()[torch.arange(64), truth].mean())
        runs = memory["statistics.near"] / memory["statistics.far"]
        assert float(runs[0]) > 1.5, "the slowest copy takes both for runs"
        assert (float(runs[1]) > 1.5) == (order == "sorted"), "the middle one only classes that come so"
    assert weights["mixed"] > 0.9, "copies that cope with the shift answer"
    pairs = statistics._preferred(torch.zeros(5), shared_runs(runs))
    assert float(pairs[4] - pairs[2]) > 1, "where classes come so, quick copies count less"


def test_runs_are_those_that_a_second_network_sees_too() -> None:
    pairs = torch.tensor([[4.0, 1.0], [4.0, 1.1], [4.0, 3.0], [1.0, 4.0], [0.9, 1.0]])
    expected = [1.0, 1.4, 4.0, 1.0, 0.9]
    assert [float(shared_runs(pair)) for pair in pairs] == pytest.approx(expected)
