"""`poem.check`: the frozen adapter against the model as it came, on labelled images, with an interval that holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
import torch
from learners import UNIT, learner, sharp, snapshot
from nets import make_net
from torch import Tensor, nn
from toys import digits, images, shifted, trained

import poem
from poem.paired_check import Check, interval, paired, sign_test


def masks(b: int, c: int, both: int, n: int) -> tuple[Tensor, Tensor]:
    """What each got right: `b` only the adapted, `c` only the source, `both` both, of `n`."""
    adapted, source = torch.zeros(2, n, dtype=torch.bool)
    adapted[: both + b] = source[:both] = source[both + b : both + b + c] = True
    return adapted, source


@cache
def helped() -> tuple[poem.Adapter, Tensor, Tensor]:
    """An adapter that has learnt on shifted digits, and labelled digits that it has not seen."""
    x, y = shifted()
    adapter = poem.adapt(trained("bn"), "tent", lr=0.005)
    for batch in x[:320].split(32):
        adapter(batch)
    assert adapter.totals.updates == 10
    return adapter, x[320:], y[320:]


# The comparison -------------------------------------------------------------------------------------------------------


def test_accuracies_and_pairs_are_those_of_both_models() -> None:
    adapter, x, y = helped()
    found = poem.check(adapter, x[:256], y[:256])
    with adapter.frozen():
        mine = torch.cat([adapter(batch) for batch in x[:256].split(32)]).argmax(1) == y[:256]
    with torch.no_grad():
        theirs = adapter.model(x[:256]).argmax(1) == y[:256]
    assert found.n == 256
    assert found.adapted_accuracy == pytest.approx(100 * float(mine.float().mean()))
    assert found.source_accuracy == pytest.approx(100 * float(theirs.float().mean()))
    assert (found.b, found.c) == (int((mine & ~theirs).sum()), int((theirs & ~mine).sum()))
    assert found.difference == pytest.approx(found.adapted_accuracy - found.source_accuracy)
    assert found.low < found.difference < found.high
    assert found.verdict == "helped"
    assert found.p_value < 0.05
    assert found.needed is None
    assert str(found).endswith("Adapting helped.")


def test_a_harmful_adapter_hurts() -> None:
    x, y = digits()
    adapter = poem.adapt(trained("gn"), "tent", lr=2.0)
    for batch in images(64, seed=0).split(32):
        adapter(batch)
    found = poem.check(adapter, x[-100:], y[-100:])
    assert found.source_accuracy > 90
    assert found.verdict == "hurt"
    assert found.high < 0
    assert str(found).endswith("Adapting hurt.")


@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
@pytest.mark.parametrize("method", ["tent", "poem", "cotta", "rotta", "bn", "lame", "neo"])
def test_nothing_is_learnt(kind: str, method: str) -> None:
    asked, left_alone = (learner(kind, method, **UNIT) for _ in range(2))
    for seed in range(3):
        before, last = snapshot(asked), asked.last
        found = poem.check(asked, images(20, seed=9), torch.arange(20) % 10)
        assert found.n == 20
        assert snapshot(asked) == before
        assert asked.last is last
        assert torch.equal(asked(images(8, seed=seed)), left_alone(images(8, seed=seed)))


def test_the_order_of_labels_matters() -> None:
    adapter, x, y = helped()
    assert poem.check(adapter, x[:64], y[:64].flip(0)).adapted_accuracy < 50


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 70])
def test_every_image_counts_once_in_a_batch_of_the_adapters_size(count: int) -> None:
    adapter, x, y = helped()
    seen: list[int] = []
    hook = adapter.model.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    try:
        found = poem.check(adapter, x[:count], y[:count])
    finally:
        hook.remove()
    with adapter.frozen():
        whole = [x[at : at + 32] for at in range(0, count - 31, 32)]
        mine = [adapter(batch).argmax(1) for batch in whole]
        rest = count - 32 * len(whole)
        if rest:
            mine.append(adapter(x[max(0, count - 32) : count]).argmax(1)[-rest:])
    assert found.n == count
    assert found.adapted_accuracy == pytest.approx(100 * float((torch.cat(mine) == y[:count]).float().mean()))
    assert set(seen) == {min(count, 32)}
    assert bool(found.notes) == (count < 32)


def test_a_batch_size_may_be_given_and_is_64_before_the_first_batch() -> None:
    sizes: list[int] = []
    net = sharp("gn")
    net.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    poem.check(learner("gn", "tent", net), images(130, seed=0), torch.zeros(130))
    assert set(sizes) == {64}
    sizes.clear()
    poem.check(learner("gn", "tent", net, batch_size=16), images(32, seed=0), torch.zeros(32))
    assert set(sizes) == {16}
    sizes.clear()
    poem.check(learner("gn", "tent", net, batch_size=16), images(32, seed=0), torch.zeros(32), batch_size=8)
    assert set(sizes) == {8}


def test_the_adapters_batch_size_is_public() -> None:
    adapter = learner("gn", "tent")
    assert adapter.batch_size is None
    adapter(images(12, seed=0))
    assert adapter.batch_size == 12
    assert learner("gn", "tent", batch_size=5).batch_size == 5


def test_an_adapter_that_has_not_learnt_says_so() -> None:
    adapter = learner("gn", "tent")
    found = poem.check(adapter, images(30, seed=0), torch.zeros(30))
    assert (found.difference, found.b, found.c, found.verdict) == (0, 0, 0, "cannot tell")
    assert "has not learnt from any batch yet" in str(found)
    adapter(images(8, seed=1))
    assert "not learnt" not in str(poem.check(adapter, images(30, seed=0), torch.zeros(30)))


@pytest.mark.parametrize("form", ["list", "column", "float", "one-hot", "numpy"])
def test_labels_of_every_kind_that_evaluate_takes(form: str) -> None:
    adapter, x, y = helped()
    same: dict[str, Any] = {
        "list": y[:40].tolist(), "column": y[:40, None], "float": y[:40].float(),
        "one-hot": nn.functional.one_hot(y[:40], 10), "numpy": y[:40].numpy(),
    }  # fmt: skip
    assert poem.check(adapter, x[:40], same[form]) == poem.check(adapter, x[:40], y[:40])


def test_a_class_mask_numbers_the_labels() -> None:
    net = make_net("gn", sharpness=6.0)
    adapter = learner("gn", "tent", net, classes=[7, 2, 4])
    with torch.no_grad():
        labels = net(images(30, seed=0))[:, [7, 2, 4]].argmax(1)
    assert poem.check(adapter, images(30, seed=0), labels).source_accuracy == 100


def test_one_logit_is_right_by_its_sign() -> None:
    net = make_net("gn", classes=1, sharpness=6.0)
    with torch.no_grad():
        z = net(images(40, seed=0))[:, 0]
    middle = z.sort().values[19:21].mean()
    net.fc.bias.data -= middle  # type: ignore[union-attr]
    found = poem.check(learner("gn", "tent", net), images(40, seed=0), z > middle)
    assert found.source_accuracy == 100


def test_any_object_with_a_source_can_be_checked() -> None:
    class Guard:
        """Around an adapter, with another answer of its own for the source."""

        def __init__(self, adapter: poem.Adapter) -> None:
            self.adapter, self.asked = adapter, 0

        def __call__(self, images: Tensor | Mapping[str, Any]) -> Tensor:
            return self.adapter(images)

        def source(self, images: Tensor | Mapping[str, Any]) -> Tensor:
            self.asked += 1
            return self.adapter.source(images)

        def frozen(self) -> AbstractContextManager[poem.Adapter]:
            return self.adapter.frozen()

    adapter, x, y = helped()
    guard = Guard(adapter)
    assert poem.check(guard, x[:64], y[:64], batch_size=32) == poem.check(adapter, x[:64], y[:64])
    assert guard.asked == 2


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "kind", "word"),
    [
        (torch.rand(4, 3, 16, 16), None, TypeError, "label a few images"),
        (torch.rand(4, 3, 16, 16), [0, 1, 2], ValueError, "one label for each of 4 images, got 3"),
        (torch.rand(4, 3, 16, 16), [], ValueError, "one label for each of 4 images, got 0"),
        (torch.rand(4, 3, 16, 16), [0, 1, 2, 10], ValueError, r"expected labels 0\.\.9"),
        (torch.rand(4, 3, 16, 16), [0, 1, 2, 1.5], ValueError, "whole numbers"),
        (torch.rand(0, 3, 16, 16), [], ValueError, "at least one labelled image"),
        (torch.full((2, 3, 16, 16), torch.nan), [0, 1], ValueError, "NaN or Inf in sample 0"),
        ([torch.rand(3, 16, 16)], [0], TypeError, "torch.cat"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), [0, 1], ValueError, "divide by 255"),
    ],
)
def test_bad_images_and_labels(x: Any, y: Any, kind: type[Exception], word: str) -> None:
    adapter = learner("gn", "tent")
    before = snapshot(adapter)
    with pytest.raises(kind, match=word):
        poem.check(adapter, x, y)
    assert snapshot(adapter) == before


def test_an_image_with_nan_is_named_by_its_place_among_all() -> None:
    x = torch.rand(100, 3, 16, 16)
    x[83, 0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="sample 83"):
        poem.check(learner("gn", "tent", batch_size=8), x, torch.zeros(100))


def test_methods_without_adapted_answers_are_refused() -> None:
    x, y = torch.rand(4, 3, 16, 16), torch.zeros(4)
    with pytest.raises(ValueError, match="got 'source', whose answers are the model's own"):
        poem.check(poem.adapt(sharp("bn"), "source"), x, y)
    with pytest.raises(ValueError, match="returns to the source after every image"):
        poem.check(poem.adapt(sharp("bn"), "memo", **UNIT), x, y)
    model: Any = sharp("bn")
    with pytest.raises(TypeError, match="expected an adapter"):
        poem.check(model, x, y)


# The numbers ----------------------------------------------------------------------------------------------------------


def test_the_sign_test_is_exact() -> None:
    assert sign_test(0, 0) == 1
    assert sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(0, 6) == pytest.approx(2 / 64)
    assert sign_test(9, 1) == sign_test(1, 9) == pytest.approx(2 * 11 / 1024)
    assert sign_test(7, 7) == 1
    by_hand = 2 * sum(math.comb(1000, k) for k in range(461)) / 2**1000
    assert sign_test(460, 540) == pytest.approx(by_hand, rel=1e-9)


def test_the_interval_is_tangos() -> None:
    # Tango 1998: with no discordant pair the ends are z^2 / (n + z^2).
    assert interval(0, 0, 50) == pytest.approx((-0.07135, 0.07135), abs=1e-5)
    # Fagerland, Lydersen and Laake 2014: for 1 and 7 of 21 pairs the score interval is -0.517 to -0.026.
    low, high = interval(1, 7, 21)
    assert low == pytest.approx(-0.517, abs=1e-3)
    assert high == 0, "the exact test does not reject, p = 0.07, so 0 is inside"
    assert sign_test(1, 7) == pytest.approx(0.0703, abs=1e-4)
    assert interval(7, 1, 21) == pytest.approx((-high, -low))


@pytest.mark.parametrize("n", [5, 20, 60])
def test_the_interval_covers_the_true_difference(n: int) -> None:
    """The exact coverage: every outcome of `n` pairs with its probability."""
    ends = {(b, c): interval(b, c, n) for b in range(n + 1) for c in range(n + 1 - b)}
    covered = []
    for apart in (0.02, 0.1, 0.3, 0.5, 0.8):
        for share in (0.5, 0.6, 0.75, 0.9, 0.999):
            p, q = apart * share, apart * (1 - share)
            total = inside = wrong = 0.0
            for (b, c), (low, high) in ends.items():
                logs = [math.lgamma(k + 1) for k in (n, b, c, n - b - c)]
                weight = math.exp(
                    logs[0] - sum(logs[1:]) + b * math.log(p) + c * math.log(q) + (n - b - c) * math.log(1 - apart)
                )
                total += weight
                inside += weight * (low <= p - q <= high)
                wrong += weight * (low > 0 or high < 0)
            assert total == pytest.approx(1)
            assert inside > 0.93, (apart, share)
            if share == 0.5:
                assert wrong <= 0.05, "without a difference a verdict is wrong in 5 % of cases at most"
            covered.append(inside)
    assert sum(covered) / len(covered) > 0.95


def test_the_interval_covers_in_simulated_checks() -> None:
    rng = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(400):
        kind = torch.multinomial(torch.tensor([0.12, 0.05, 0.83]), 150, replacement=True, generator=rng)
        found = paired((kind == 0) | (kind == 2), (kind == 1) | (kind == 2))
        inside += found.low <= 7 <= found.high
    assert 0.93 <= inside / 400 <= 0.99


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [((20, 5, 100, 200), "helped"), ((5, 20, 100, 200), "hurt"), ((6, 5, 100, 200), "cannot tell"),
     ((5, 0, 5, 10), "cannot tell"), ((6, 0, 4, 10), "helped"), ((0, 0, 1, 1), "cannot tell")],
)  # fmt: skip
def test_the_verdict_is_the_intervals_and_the_tests(counts: tuple[int, int, int, int], verdict: str) -> None:
    found = paired(*masks(*counts))
    assert found.verdict == verdict
    assert (found.p_value < 0.05) == (verdict != "cannot tell")
    assert (found.low > 0 or found.high < 0) == (verdict != "cannot tell")
    assert (found.needed is None) == (verdict != "cannot tell")
    assert found.low <= found.difference <= found.high


def test_the_needed_images_would_tell_in_four_of_five_cases() -> None:
    found = paired(*masks(9, 4, 80, 100))
    assert found.verdict == "cannot tell"
    assert found.needed is not None
    assert found.needed > 100
    rng = torch.Generator().manual_seed(0)
    told = 0
    for _ in range(200):
        kind = torch.multinomial(torch.tensor([0.09, 0.04, 0.87]), found.needed, replacement=True, generator=rng)
        told += paired(kind == 0, kind == 1).verdict == "helped"
    assert 0.7 <= told / 200 <= 0.95


def test_the_words() -> None:
    assert str(paired(*masks(25, 10, 138, 200))) == (
        "On 200 labelled images the adapted model is right on 81.5 %, the model as it came on 74.0 %: 7.5 points more "
        "(95 % interval of adapted minus source: +1.8 to +13.6). Adapting helped."
    )
    assert str(paired(*masks(3, 9, 20, 40))) == (
        "On 40 labelled images the adapted model is right on 57.5 %, the model as it came on 72.5 %: 15.0 points less "
        "(95 % interval of adapted minus source: -32.1 to +2.2). These images cannot tell whether adapting helped. "
        "If the true difference is "
        "15.0 points, about 110 labelled images are needed to tell."
    )
    same = str(paired(*masks(0, 0, 1, 1)))
    assert same.startswith("On 1 labelled image the adapted model")
    assert "no difference" in same
    assert "If the true difference is 2 points" in same


def test_a_check_is_a_value() -> None:
    found = paired(*masks(2, 1, 3, 9))
    assert found == paired(*masks(2, 1, 3, 9))
    assert isinstance(found, Check)
    with pytest.raises(AttributeError):
        found.n = 5  # type: ignore[misc]
    with pytest.raises(ValueError, match="two masks of one shape"):
        paired(torch.ones(3), torch.ones(4))


def test_its_module_does_not_hide_the_function() -> None:
    import poem.paired_check

    assert poem.check is poem.paired_check.check
