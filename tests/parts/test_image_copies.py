"""Copies of the images, mirrored, moved and smoothed: how they are made, and how much each of them counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import poem
from poem import zoo
from poem.parts import Blended, CopiesPrior, ImageCopy, LocalPrior, Readout
from poem.parts.image_copy import smoothed
from poem.streams.datasets import open_dataset


def _with_copies(method: str = "auto", **settings: Any) -> poem.Adapter:
    model, base = zoo.load("digits-gn")
    readout = Readout("last", CopiesPrior(**settings))
    return poem.adapt(model, method, readout=readout, mean=base.mean, std=base.std, guard=False)


def _noisy_digits(count: int) -> torch.Tensor:
    data = open_dataset("digits-test")
    images = torch.stack([torch.as_tensor(data[at]) for at in range(count)])
    noisy: torch.Tensor = poem.corrupt(images, "gaussian_noise", 5)
    return noisy.float() / 255


# How they are made ----------------------------------------------------------------------------------------------------


def test_a_filter_keeps_what_is_even_and_loses_noise() -> None:
    rng = torch.Generator().manual_seed(0)
    even = torch.full((2, 3, 16, 12), 0.25)
    assert torch.allclose(smoothed(even, 1.5), even, atol=1e-6)
    point = torch.zeros(1, 1, 31, 31)
    point[..., 15, 15] = 1
    spread, at = smoothed(point, 1.0)[0, 0], torch.arange(31) - 15.0
    assert float(spread.sum()) == pytest.approx(1, abs=1e-5)
    assert float((spread.sum(0) * at.square()).sum()) == pytest.approx(1, rel=0.03)  # sigma squared
    noise = torch.randn(4, 3, 64, 64, generator=rng)
    # of white noise's variance a Gaussian filter leaves 1 / (4 pi sigma ** 2)
    assert float(smoothed(noise, 1.5).var() / noise.var()) == pytest.approx(1 / (9 * np.pi), rel=0.15)
    assert smoothed(torch.rand(1, 3, 2, 2), 1.5).shape == (1, 3, 2, 2)


def test_a_copy_is_mirrored_moved_and_smoothed_and_by_default_the_image_itself() -> None:
    images = torch.rand(2, 3, 64, 32)
    assert torch.equal(ImageCopy()(images), images)
    assert torch.equal(ImageCopy(mirrored=True)(images), images.flip(-1))
    right = ImageCopy(move=1 / 32)(images)  # one pixel to the right, two down
    assert torch.equal(right[..., 2:, 1:], images[..., :-2, :-1])
    assert torch.equal(right[..., 0, 1:], images[..., 0, :-1]), "the edge is repeated"
    back = ImageCopy(move=-1 / 32)(right)
    assert torch.equal(back[..., :-2, :-1], images[..., :-2, :-1])
    assert torch.equal(ImageCopy(0.7)(images), smoothed(images, 0.7))
    assert torch.equal(ImageCopy(0.7, mirrored=True)(images), ImageCopy(0.7)(images.flip(-1)))
    wide = ImageCopy(0.7)(torch.rand(1, 1, 224, 224, generator=torch.Generator().manual_seed(0)))
    assert float(wide.var() * 12) == pytest.approx(1 / (4 * np.pi * (0.7 * 7**0.4) ** 2), rel=0.15)
    assert ImageCopy(0.7, 0.1)(torch.rand(4, 9)).shape == (4, 9)


# On batch norm --------------------------------------------------------------------------------------------------------


def test_the_source_s_copy_shows_the_images_as_they_are_and_others_are_shown_in_as_many_passes() -> None:
    model, base = zoo.load("digits-bn")
    known: dict[str, Any] = {"mean": base.mean, "std": base.std, "guard": False}
    changes: tuple[dict[str, Any], ...] = (
        {}, {"statistics": Blended()}, {"statistics": Blended(images=(ImageCopy(),) * 5)},
    )  # fmt: skip
    auto, plain, same = (poem.adapt(model, "auto", **changed, **known) for changed in changes)
    for batch in _noisy_digits(96).split(32):
        answer, expected = auto(batch).softmax(1), plain(batch).softmax(1)
        assert torch.allclose(same(batch).softmax(1), expected, atol=1e-5)
        assert not torch.allclose(answer, expected, atol=1e-3)
    assert auto.totals.forwards == plain.totals.forwards == 5 * 96
    statistics = auto.recipe.statistics
    assert statistics.source_copy is not None
    assert statistics.image_copies[statistics.source_copy] == ImageCopy()


@pytest.mark.parametrize(
    ("images", "words"),
    [((ImageCopy(),), "one ImageCopy for each of 5 weights, got 1"), ((ImageCopy(0.5),) * 5, "the source's copy")],
)
def test_blended_refuses_images_that_do_not_fit_its_copies(images: tuple[ImageCopy, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Blended(images=images)


# On group and layer norm ----------------------------------------------------------------------------------------------


def test_a_copy_counts_by_how_well_it_has_told_images_apart() -> None:
    """Two batches by hand: means and entropies are those of all images so far, the answer is the weighted mean."""
    images = _noisy_digits(96)
    model, base = zoo.load("digits-gn")
    source = poem.adapt(model, "source", mean=base.mean, std=base.std)
    adapter = _with_copies("source", copies=(ImageCopy(0.7),), power=0.0)
    probs = [source(each).softmax(1) for each in (images, smoothed(images, 0.7))]
    for start, end in ((0, 64), (64, 96)):
        seen = [each[:end] for each in probs]
        means = [-(each.mean(0) * each.mean(0).log()).sum() for each in seen]
        told = [mean + (each * each.log()).sum(1).mean() for mean, each in zip(means, seen, strict=True)]
        weights = (30 * (torch.stack(told) / np.log(10) + torch.tensor([0.02, 0.0]))).softmax(0)
        assert 0.02 < float(weights[0]) < 0.98
        expected = weights[0] * probs[0][start:end] + weights[1] * probs[1][start:end]
        assert torch.allclose(adapter(images[start:end]).softmax(1), expected, atol=1e-5)
        if start == 0:  # the prior is that of the answers, not of the images as they are
            near = adapter.state_dict()["tensors"]["memory/readout.correct.near"]
            assert torch.allclose(near, expected.mean(0), atol=1e-5)
            assert not torch.allclose(near, probs[0][:64].mean(0), atol=1e-4)


def test_the_images_as_they_are_answer_alone_where_copies_count_nothing() -> None:
    model, base = zoo.load("digits-gn")
    readout = Readout("last", LocalPrior())
    plain = poem.adapt(model, "auto", readout=readout, mean=base.mean, std=base.std, guard=False)
    alone, far_ahead = _with_copies(copies=()), _with_copies(copies=(ImageCopy(0.7),), margin=1e6)
    for batch in _noisy_digits(96).split(32):
        answer = plain(batch).log_softmax(1)
        for each in (alone, far_ahead):
            assert torch.allclose(each(batch).log_softmax(1), answer, atol=1e-5)
    assert plain.totals.taught > 0


def test_an_adapter_with_copies_is_reset_saved_and_loaded_whole(tmp_path: Path) -> None:
    batches = _noisy_digits(96).split(32)
    adapter = _with_copies()
    answers = [adapter(batch) for batch in batches]
    alone: dict[str, Any] = {"method": "source", "power": 0.0}  # nothing else remembers
    after = _with_copies(**alone)
    after(batches[0])
    assert not torch.equal(after(batches[1]), _with_copies(**alone)(batches[1]))
    adapter.reset()
    assert all(torch.equal(adapter(batch), was) for batch, was in zip(batches, answers, strict=True))
    adapter.save(tmp_path / "state.safetensors")
    elsewhere = _with_copies()
    elsewhere.load(tmp_path / "state.safetensors")
    assert torch.equal(elsewhere(batches[0]), adapter(batches[0]))


@pytest.mark.parametrize("net", ["digits-gn", "digits-bn"])
def test_four_copies_cost_four_passes_and_a_frozen_call_keeps_the_state(net: str) -> None:
    model, base = zoo.load(net)
    known: dict[str, Any] = {"mean": base.mean, "std": base.std, "guard": False}
    readouts = Readout("last", LocalPrior()), Readout("last", CopiesPrior())
    plain, smooth = (poem.adapt(model, "auto", readout=readout, **known) for readout in readouts)
    for each in (plain, smooth):
        each(_noisy_digits(64))
    copies = smooth.recipe.statistics.copies if net == "digits-bn" else 1
    assert smooth.totals.forwards - plain.totals.forwards == 4 * copies * 64
    before = smooth.state_dict()["tensors"]
    with smooth.frozen():
        assert smooth(_noisy_digits(7)).shape == (7, 10)
    after = smooth.state_dict()["tensors"]
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_an_export_with_copies_says_what_to_give_instead() -> None:
    adapter = _with_copies()
    adapter(_noisy_digits(64))
    with pytest.raises(ValueError, match=r"statistics='frozen'.*readout=Readout\('last', LocalPrior\(\)\)"):
        adapter.export()
    assert adapter.export(statistics="frozen")(_noisy_digits(8)).shape == (8, 10)
