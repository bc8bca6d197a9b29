"""`adapter.source`: the model as it came, asked through the adapter, at any time and without a trace."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from adapters import capturing
from learners import UNIT, batch, learner, sharp, snapshot
from torch import Tensor, nn

import poem

NETS = ("bn", "gn", "ln")
METHODS = ("tent", "poem", "sar", "eta", "deyo+poem", "cotta", "rotta", "neo", "source")


def plain(model: nn.Module, images: Tensor) -> Tensor:
    """What the model answers by itself in eval mode."""
    with torch.no_grad():
        logits: Tensor = copy.deepcopy(model).eval()(images)
    return logits


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("method", METHODS)
def test_source_is_the_plain_model_to_the_bit_before_and_after_adapting(kind: str, method: str) -> None:
    net = sharp(kind)
    expected = plain(net, batch(seed=5))
    adapter = learner(kind, method, net, **UNIT)
    assert torch.equal(adapter.source(batch(seed=5)), expected), "before the first batch"
    for seed in range(3):
        adapter(batch(seed=seed))
    answer = adapter.source(batch(seed=5))
    assert torch.equal(answer, expected)
    assert not answer.requires_grad
    assert torch.equal(adapter.source(batch(3, seed=6)), plain(net, batch(3, seed=6))), "a batch of another size"


def test_the_adapted_answer_is_another_one() -> None:
    adapter = learner("bn", "tent")
    adapter(batch())
    assert adapter.totals.taught > 0
    with adapter.frozen():
        assert not torch.allclose(adapter(batch()), adapter.source(batch()), atol=1e-3)


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("method", METHODS)
def test_source_leaves_state_counts_and_answers_bit_identical(kind: str, method: str) -> None:
    asked, left_alone = (learner(kind, method, **UNIT) for _ in range(2))
    for seed in range(3):
        before, last = snapshot(asked), asked.last
        asked.source(batch(6, seed=9))
        assert snapshot(asked) == before
        assert asked.last is last
        assert torch.equal(asked(batch(seed=seed)), left_alone(batch(seed=seed)))
    assert snapshot(asked) == snapshot(left_alone)


def test_class_mask_and_normalisation_apply() -> None:
    net, mean, std = sharp("bn"), (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    adapter = learner("bn", "tent", net, classes=[7, 2, 4], mean=mean, std=std)
    shape = (1, 3, 1, 1)
    normalised = (batch() - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
    assert torch.equal(adapter.source(batch()), plain(net, normalised)[:, [7, 2, 4]])


def test_a_model_in_training_mode_is_asked_in_eval_mode() -> None:
    net = sharp("bn").train()
    running = {name: tensor.clone() for name, tensor in net.named_buffers()}
    assert torch.equal(learner("bn", "tent", net).source(batch()), plain(net, batch()))
    assert net.training
    assert all(torch.equal(tensor, running[name]) for name, tensor in net.named_buffers())


def test_source_between_captured_batches() -> None:
    with capturing("cpu"):
        captured, eager = (learner("gn", "poem", fast=fast) for fast in (True, False))
        for seed in range(4):
            assert torch.equal(captured.source(batch(seed=8)), eager.source(batch(seed=8)))
            captured(batch(seed=seed))
            eager(batch(seed=seed))
        assert snapshot(captured) == snapshot(eager)


def test_threads_get_the_plain_model_while_another_adapts() -> None:
    net = sharp("bn")
    adapter, expected, found = learner("bn", "tent", net), plain(net, batch(seed=5)), list[Tensor]()

    def ask() -> None:
        found.extend(adapter.source(batch(seed=5)) for _ in range(10))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for seed in range(10):
        adapter(batch(seed=seed))
    for thread in threads:
        thread.join()
    assert adapter.totals.taught > 0
    assert len(found) == 30
    assert all(torch.equal(each, expected) for each in found)
    alone = learner("bn", "tent")
    for seed in range(10):
        alone(batch(seed=seed))
    assert snapshot(adapter) == snapshot(alone)


@pytest.mark.parametrize(
    ("images", "word"),
    [
        (torch.full((2, 3, 16, 16), torch.nan), "finite images"),
        (torch.rand(3, 16, 16), "unsqueeze"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "255"),
    ],
)
def test_source_refuses_what_a_call_refuses(images: Tensor, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        learner("bn", "tent").source(images)


def test_an_unloaded_adapter_has_no_source() -> None:
    adapter: Any = poem.adapt(sharp("gn"), "tent")
    adapter.unload()
    with pytest.raises(RuntimeError, match="unloaded"):
        adapter.source(batch())
