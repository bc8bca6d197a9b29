"""Parts that a user writes: memory, tensors that are trained, and preparation on source data, each kept and reset."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same_answers, assert_same_state
from learners import LR, batch, learner, sharp
from torch import Tensor

import poem
from poem.parts import (
    SAM,
    SGD,
    Adam,
    ByDiversityAndCertainty,
    Diverse,
    Entropy,
    EntropyBelow,
    Everyone,
    Memory,
    Need,
    Objective,
    Outcome,
    Outputs,
    Select,
    Selected,
    Step,
    Weigh,
)

KINDS = ("bn", "gn", "ln")


# Two parts of one class -----------------------------------------------------------------------------------------------


def mean_predictions(answers: list[Tensor], momentum: float) -> Tensor:
    """The moving average of the batches' mean predictions, from uniform."""
    mean = torch.full_like(answers[0][0], 1 / answers[0].shape[1])
    for logits in answers:
        mean = momentum * mean + (1 - momentum) * logits.softmax(1).mean(0)
    return mean


@pytest.mark.parametrize(
    ("changes", "memories"),
    [
        ({"select": Diverse(0.5) & Diverse(0.9)}, {"select.first": 0.5, "select.second": 0.9}),
        ({"select": Diverse(0.9) & Diverse(0.5)}, {"select.first": 0.9, "select.second": 0.5}),
        (
            {"select": Diverse(momentum=0.5), "weigh": ByDiversityAndCertainty(momentum=0.9)},
            {"select": 0.5, "weigh": 0.9},
        ),
    ],
    ids=["filters", "filters-swapped", "filter-and-weights"],
)
def test_two_parts_of_one_class_keep_separate_memory(changes: dict[str, Any], memories: dict[str, float]) -> None:
    """Each follows its own momentum, and each is given its own average."""
    adapter, answers = learner("gn", "tent", **{"lr": 1e-5, **changes}), []
    for seed in range(3):
        answers.append(adapter(batch(seed=seed)))
        assert adapter.last.updates == 1
    tensors = adapter.state_dict()["tensors"]
    assert {key for key in tensors if key.startswith("memory/")} == {f"memory/{place}.mean" for place in memories}
    for place, momentum in memories.items():
        expected = mean_predictions(answers, momentum)
        torch.testing.assert_close(tensors[f"memory/{place}.mean"], expected, rtol=0, atol=1e-6)
    one, other = (tensors[f"memory/{place}.mean"] for place in memories)
    assert (one - other).abs().max() > 1e-3


def test_each_of_two_filters_selects_by_its_own_memory() -> None:
    """What both select is what each selects, given its own average of the batches before."""
    select = Diverse(0.0) & Diverse(1.0)  # one knows the batch before alone, the other stays uniform
    adapter = learner("gn", "tent", lr=0.0, select=select)
    first = adapter(batch(seed=0))
    logits = adapter(batch(seed=1))
    outputs, everyone = Outputs(logits, (logits,)), torch.ones(8, dtype=torch.bool)
    kept = Diverse()(outputs, everyone, {"mean": first.softmax(1).mean(0)})
    again = Diverse()(outputs, everyone, {"mean": torch.full((10,), 0.1)})
    assert torch.equal(adapter.last.selected, kept & again)
    assert not torch.equal(kept, again)


# A part that remembers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class AboveAverage(Select):
    """Samples at least as confident as the stream was on average, and how many batches there were."""

    momentum: float = 0.9

    def start(self, outputs: Outputs) -> Memory:
        return {"mean": outputs.probs.new_zeros(()), "batches": torch.zeros((), dtype=torch.long)}

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among & (outputs.probs.amax(1) >= memory["mean"])

    def remember(self, outcome: Outcome, memory: Memory) -> Memory:
        now = outcome.first.probs.amax(1).mean()
        return {"mean": self.momentum * memory["mean"] + (1 - self.momentum) * now, "batches": memory["batches"] + 1}


@dataclass(frozen=True, repr=False)
class Fading(Weigh):
    """Weights that halve with every batch, which shows in the loss."""

    def start(self, outputs: Outputs) -> Memory:
        return {"weight": outputs.probs.new_ones(())}

    def __call__(self, outputs: Outputs, mask: Tensor, memory: Memory) -> Tensor:
        return memory["weight"].expand(len(mask))

    def remember(self, outcome: Outcome, memory: Memory) -> Memory:
        return {"weight": memory["weight"] / 2}


def remembering(kind: str, **changes: Any) -> poem.Adapter:
    settings = {"select": EntropyBelow(0.9) & AboveAverage(), "weigh": Fading(), **changes}
    return learner(kind, "tent", **settings)


# A part that is trained -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Tempered(Objective):
    """Entropy at a temperature and with a bias that are trained, `factor` times as fast as the network."""

    factor: float = 5.0

    def trainable(self, outputs: Outputs) -> Memory:
        return {"bias": outputs.logits.new_zeros(outputs.classes), "temperature": outputs.logits.new_ones(())}

    def lr_factor(self, family: str) -> float:
        return self.factor if family == "convolutional" else 2 * self.factor

    def __call__(self, selected: Selected) -> Tensor:
        bias, temperature = selected.trained["bias"], selected.trained["temperature"]
        log_probs = (selected.outputs.logits * temperature + bias).log_softmax(1)
        return selected.mean(-(log_probs.exp() * log_probs).sum(1))


PLACE = "minimise.second"


def trained(kind: str, **changes: Any) -> poem.Adapter:
    return learner(kind, "tent", **{"minimise": Entropy() + Tempered(), **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_a_part_is_trained_at_its_own_rate(kind: str) -> None:
    """The first step of SGD is `-lr * factor * gradient`, the gradient of the loss at the start by autograd."""
    adapter = trained(kind)
    logits = adapter(batch()).detach()
    bias, temperature = torch.zeros(10, requires_grad=True), torch.ones((), requires_grad=True)
    log_probs = (logits * temperature + bias).log_softmax(1)
    loss = -(log_probs.exp() * log_probs).sum(1).mean()
    gradients = dict(zip(("bias", "temperature"), torch.autograd.grad(loss, [bias, temperature]), strict=True))
    factor = 10.0 if kind == "ln" else 5.0
    moved = adapter.state_dict()["tensors"]
    for name, start in (("bias", torch.zeros(10)), ("temperature", torch.ones(()))):
        expected = start - LR[kind] * factor * gradients[name]
        torch.testing.assert_close(moved[f"moved/{PLACE}.{name}"], expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(expected, start)
    assert adapter.adapted[-2:] == [f"{PLACE}.bias", f"{PLACE}.temperature"]


@pytest.mark.parametrize("step", [SGD(), Adam(), SAM(0.01, Adam())], ids=repr)
def test_a_tensor_of_a_part_has_an_optimiser_memory_of_its_own(step: Step) -> None:
    adapter = trained("gn", step=step)
    fresh = adapter.state_dict()["tensors"]
    adapter(batch())
    own = set(adapter.state_dict()["tensors"]) - set(fresh)
    names = step.init(torch.zeros(1))
    tensors = [f"{PLACE}.{name}" for name in ("bias", "temperature")]
    assert own == {*(f"moved/{t}" for t in tensors), *(f"step/{t}/{name}" for t in tensors for name in names)}


def test_a_tensor_of_a_part_returns_to_its_start_when_the_method_resets() -> None:
    adapter = trained("gn", recover=poem.parts.EveryCalls(2))
    adapter(batch(seed=0))
    adapter(batch(seed=1))
    adapter(batch(seed=2))
    assert adapter.last.reset
    alone = trained("gn")
    alone(batch(seed=2))
    for key, tensor in alone.state_dict()["tensors"].items():
        assert torch.equal(tensor, adapter.state_dict()["tensors"][key]), key


# A part that is prepared ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class BelowSource(Select):
    """Samples below the mean entropy on source images, which also counts the batches that came."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.SOURCE_DATA})

    def prepare(self, batches: Iterable[Outputs]) -> Memory:
        return {"limit": torch.cat([outputs.entropy.detach() for outputs in batches]).mean()}

    def start(self, outputs: Outputs) -> Memory:
        return {"batches": torch.zeros((), dtype=torch.long)}

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among & (outputs.entropy.detach() < memory["limit"])

    def remember(self, outcome: Outcome, memory: Memory) -> Memory:
        assert "limit" in memory
        return {"batches": memory["batches"] + 1}


SOURCE = batch(32, seed=9)


def prepared(kind: str, **changes: Any) -> poem.Adapter:
    return learner(kind, "tent", **{"select": Everyone() & BelowSource(), "source_data": SOURCE, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_measures_on_source_data_and_a_reset_keeps_it(kind: str) -> None:
    adapter = prepared(kind, statistics=poem.parts.Source())
    log_probs = sharp(kind)(SOURCE).detach().log_softmax(1)
    limit = -(log_probs.exp() * log_probs).sum(1).mean()
    logits = adapter(batch())
    inner = logits.log_softmax(1)
    expected = -(inner.exp() * inner).sum(1) < limit
    assert 0 < int(expected.sum()) < 8
    assert torch.equal(adapter.last.selected, expected)
    assert adapter.preparation == {"forwards": 32, "backwards": 32}
    adapter.reset()
    adapter(batch())
    assert torch.equal(adapter.last.selected, expected)
    assert not any("limit" in key for key in adapter.state_dict()["tensors"]), "source data is not part of a state"


def test_a_state_needs_the_same_source_data() -> None:
    state = prepared("gn").state_dict()
    prepared("gn").load_state_dict(state)
    with pytest.raises(ValueError, match="pass the same source_data="):
        prepared("gn", source_data=batch(32, seed=10)).load_state_dict(state)


def test_two_parts_measure_apart() -> None:
    """Each place has its own measurement; equal parts read the source data once, and `preparation` counts it once."""
    both = {"select": BelowSource() & BelowSource(), "minimise": Entropy() + poem.parts.FisherAnchor(1.0)}
    adapter = prepared("gn", **both)
    assert set(adapter.state_dict()["prepared"]) == {
        "select.first.limit", "select.second.limit", "minimise.second.importance",
    }  # fmt: skip
    assert adapter.preparation["forwards"] == 2 * 32
    adapter(batch())
    tensors = adapter.state_dict()["tensors"]
    assert {"memory/select.first.batches", "memory/select.second.batches"} <= set(tensors)


# All three, through save, load, reset and copy ------------------------------------------------------------------------

Make = Callable[..., poem.Adapter]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [remembering, trained, prepared])
def test_a_part_of_ones_own_is_saved_loaded_reset_and_copied(make: Make, kind: str, tmp_path: Path) -> None:
    batches = [batch(seed=seed) for seed in range(4)]
    whole = make(kind)
    fresh = whole.state_dict()
    answers = [whole(each) for each in batches]
    assert whole.totals.updates == 4
    begun = {key for key in whole.state_dict()["tensors"] if key not in fresh["tensors"]}
    assert begun, "the part left nothing in the state"

    half = make(kind)
    for each in batches[:2]:
        half(each)
    half.save(tmp_path / "state")
    saved = half.state_dict()
    elsewhere, copied = make(kind, seed=3), copy.deepcopy(half)
    elsewhere.load(tmp_path / "state")
    for other in (half, elsewhere, copied):
        assert_same_state(other.state_dict(), saved)
        assert_same_answers([other(each) for each in batches[2:]], answers[2:])
        assert_same_state(other.state_dict(), whole.state_dict())

    whole.load_state_dict(saved)  # into an adapter that went on
    assert_same_answers([whole(each) for each in batches[2:]], answers[2:])
    whole.load_state_dict(fresh)  # and one that had not begun
    assert_same_state(whole.state_dict(), fresh)
    assert_same_answers([whole(each) for each in batches], answers)
    whole.reset()
    assert_same_state(whole.state_dict(), fresh)
    assert_same_answers([whole(each) for each in batches], answers)


@pytest.mark.parametrize("make", [remembering, trained, prepared])
def test_a_frozen_call_leaves_a_part_of_ones_own_alone(make: Make) -> None:
    adapter = make("gn")
    with adapter.frozen():
        adapter(batch())
    adapter(batch())
    before = adapter.state_dict()
    with adapter.frozen():
        adapter(batch(seed=5))
    assert_same_state(adapter.state_dict(), before)


def test_memory_is_of_the_last_update_that_was_applied() -> None:
    """`after_updates` decides on the device: updates that were not applied, or none at all, leave what was."""
    logits = torch.zeros(2, 3)
    outputs, mask = Outputs(logits, (logits,)), torch.ones(2, dtype=torch.bool)
    no, yes = torch.tensor(False), torch.tensor(True)
    memory = {"count": torch.tensor(7.0)}

    def kept(*applied: Tensor, selections: int = 0) -> float:
        updates = [poem.parts.Update(outputs, mask, torch.tensor(float(i)), {}, flag) for i, flag in enumerate(applied)]
        numbers = iter(range(1, 10))
        outcome = Outcome(outputs, outputs, updates, [mask] * selections)
        new = outcome.after_updates(lambda *_: {"count": torch.tensor(float(next(numbers)))}, memory)
        return float({**memory, **new}["count"])

    assert [kept(yes), kept(no), kept(yes, no), kept(no, yes), kept(yes, yes)] == [1, 7, 1, 2, 2]
    assert [kept(), kept(selections=1)] == [7, 1]
