"""Audio, series, tables, volumes, models that take keywords or a dictionary, and what is refused at the door."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_same_state
from learners import snapshot
from torch import Tensor, nn

import poem
from poem.accelerate import capture
from poem.parts import EntropyBelow, Everything, RunningMean

EDITING = (
    "deyo", "roid", "memo", "cotta", "rotta", "cmf", "spa", "poem-official", "poem-official-v2", "deyo+poem",
    "roid+poem",
)  # fmt: skip
"""Methods that destroy or augment images."""
PLAIN = tuple(name for name in poem.methods() if not name.startswith((*EDITING, "rem", "petta")))
SETTINGS: dict[str, Any] = {"preset": "cifar", "lr": 0.01}


def sharpened(net: nn.Sequential) -> nn.Module:
    """Surer of some samples than of others, so that methods with a threshold select some."""
    last = net[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.mul_(12)
    return net.eval()


def table() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for wide in (12, 32, 32):
        layers += [nn.Linear(wide, 32), nn.BatchNorm1d(32), nn.ReLU()]
    return sharpened(nn.Sequential(*layers, nn.Linear(32, 5)))


def audio() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for wide in (1, 16, 16):
        layers += [nn.Conv1d(wide, 16, 9, 4), nn.BatchNorm1d(16), nn.ReLU()]
    return sharpened(nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 5)))


def volume() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for wide in (1, 16, 16):
        layers += [nn.Conv3d(wide, 16, 3, 2, 1), nn.BatchNorm3d(16), nn.ReLU()]
    return sharpened(nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 5)))


def series() -> nn.Module:
    """(batch, time, features), as transformers take them: layer norm, no convolution."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(6, 32)]
    for _ in range(3):
        layers += [nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()]
    return sharpened(nn.Sequential(*layers, nn.Flatten(), nn.Linear(10 * 32, 5)))


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "table": (table, (12,)),
    "audio": (audio, (1, 400)),
    "volume": (volume, (1, 10, 10, 10)),
    "series": (series, (10, 6)),
}


def data(kind: str, count: int = 16, seed: int = 1) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(count, *KINDS[kind][1], generator=rng)


# Any floating-point tensor -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", PLAIN)
def test_methods_that_leave_images_alone_adapt_on_any_tensor(kind: str, method: str) -> None:
    source = [data(kind, seed=4)] if poem.recipe(method).uses_source_data else None
    adapter = poem.adapt(KINDS[kind][0](), method, source_data=source, **SETTINGS)
    for seed in (1, 2, 3):
        first = adapter(data(kind, seed=seed))
        assert first.shape == (16, 5)
        assert bool(first.isfinite().all())
    before = adapter.state_dict()["tensors"]
    adapter.reset()
    for seed in (1, 2, 3):
        again = adapter(data(kind, seed=seed))
    assert torch.equal(first, again)
    assert all(torch.equal(value, before[name]) for name, value in adapter.state_dict()["tensors"].items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["tent", "eata", "sar", "poem"])
def test_they_learn_on_any_tensor(kind: str, method: str) -> None:
    loose: dict[str, Any] = {"select": EntropyBelow(0.95)} if method in ("sar", "poem") else {}
    adapter = poem.adapt(KINDS[kind][0](), method, **SETTINGS, **loose)
    source = {name: value.clone() for name, value in adapter.model.named_parameters()}
    for seed in range(1, 5):
        adapter(data(kind, seed=seed))
    assert adapter.totals.updates > 0
    assert adapter.drift > 0 or adapter.totals.resets > 0
    assert all(torch.equal(value, source[name]) for name, value in adapter.model.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", EDITING)
def test_methods_that_edit_images_say_so_before_anything_changes(kind: str, method: str) -> None:
    if poem.recipe(method).unit_range:  # refused when it is made, without mean and std
        with pytest.raises(ValueError, match=r"augments images.*use a method that does not edit its input, such as"):
            poem.adapt(KINDS[kind][0](), method, preset="cifar")
    adapter = poem.adapt(KINDS[kind][0](), method, preset="cifar", mean=(0.0,), std=(1.0,))
    before = snapshot(adapter)
    for call in (adapter, adapter.source, adapter.gradient_norms):
        with pytest.raises(ValueError, match=r"got shape.*does not edit its input, such as 'tent', 'eata', 'sar'"):
            call(data(kind))
    assert snapshot(adapter) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_that_masks_patches_takes_vision_transformers_alone(kind: str) -> None:
    with pytest.raises(ValueError, match="drops tokens and needs a vision transformer"):
        poem.adapt(KINDS[kind][0](), "rem")


@pytest.mark.parametrize("spatial", [1, 3])
def test_a_network_that_convolves_over_other_than_two_dimensions_is_not_asked_for_channel_means(spatial: int) -> None:
    net = audio() if spatial == 1 else volume()
    with pytest.raises(ValueError, match=rf"roid augments images, and the network convolves over {spatial} dimension"):
        poem.adapt(net, "roid")


class Raw(nn.Module):
    """Takes a waveform (batch, time) and adds the channel itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = audio()

    def forward(self, waves: Tensor) -> Tensor:
        logits: Tensor = self.net(waves[:, None])
        return logits


def test_a_model_that_reshapes_its_input_is_tried_once_and_taken() -> None:
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    net = Raw()
    net.register_forward_hook(count)
    adapter, plain = poem.adapt(net, "tent", lr=0.01), poem.adapt(audio(), "tent", lr=0.01)
    for seed in (1, 2):
        assert torch.equal(adapter(data("audio", seed=seed)[:, 0]), plain(data("audio", seed=seed)))
    assert passes == 3, "a pass for each batch, and one to try the shape"
    before = snapshot(adapter)
    with pytest.raises(
        ValueError, match=r"a batch of 3 dimensions, \(batch, 1, ...\), got shape \(16, 1, 2, 400\)"
    ) as told:
        adapter(torch.randn(16, 1, 2, 400))
    assert told.value.__cause__ is not None
    assert snapshot(adapter) == before


# Keywords and dictionaries -------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """A series with a mask, and a flag: logits of the mean over what the mask keeps."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Linear(6, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(4))
        self.norm, self.head = norm(32), nn.Linear(32, 5)
        with torch.no_grad():
            self.head.weight.mul_(12)

    def forward(
        self, mask: Tensor | None = None, values: Tensor | None = None, double: bool = False
    ) -> dict[str, Tensor]:
        assert values is not None
        x = self.inside(values)
        for block in self.blocks:
            x = x + block(x)
        weights = torch.ones_like(x[..., :1]) if mask is None else mask[..., None].to(x.dtype)
        logits = self.head(self.norm((x * weights).sum(1) / weights.sum(1)))
        return {"logits": 2 * logits if double else logits}


class OfDictionary(nn.Module):
    """Takes the batch as one dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Masked()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        assert "labels" not in batch
        logits: Tensor = self.net(mask=batch["mask"], values=batch["values"])["logits"]
        return logits


def masks(count: int = 16) -> Tensor:
    kept = torch.ones(count, 10, dtype=torch.long)
    for row in range(count):
        kept[row, 4 + row % 6 :] = 0
    return kept


class ByHand(nn.Module):
    """The same network, for input that holds the mask as its last feature."""

    def __init__(self, net: Masked) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(mask=x[..., -1], values=x[..., :-1])["logits"]
        return logits


@pytest.mark.parametrize("method", ["tent", "eata", "sar", "poem", "auto", "lame", "tent*"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_arguments_that_go_along_are_those_of_each_sample(method: str, norm: Callable[[int], nn.Module]) -> None:
    """Beside the same network with the mask inside its one tensor: the same answers, batch by batch."""
    whole: dict[str, Any] = {**SETTINGS, "source_data": None}
    one = poem.adapt(Masked(norm).eval(), method, **whole)
    other = poem.adapt(ByHand(Masked(norm).eval()), method, **whole)
    for seed in (1, 2, 3):
        values = data("series", seed=seed)
        joined = torch.cat([values, masks()[..., None].float()], dim=2)
        torch.testing.assert_close(one(values=values, mask=masks()), other(joined), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(one.source(values=values, mask=masks()), other.source(joined))
    if method in ("tent", "tent*"):
        assert one.totals.updates > 0
    assert one.totals.updates == other.totals.updates


class Prompted(nn.Module):
    """Similarities of images with texts, which are the same for all images: a class for each text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [(nn.Conv2d(width, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for width in (3, 16, 16)]
        self.body = nn.Sequential(*[nn.Sequential(*block) for block in blocks])
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor, texts: Tensor) -> Tensor:
        logits: Tensor = 5 * self.out(self.body(x).mean((2, 3))) @ texts.T
        return logits


@pytest.mark.parametrize("method", ["auto", "tent", "poem"])
def test_an_argument_that_came_with_another_length_is_shared_by_all_samples(method: str) -> None:
    texts = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
    adapter = poem.adapt(Prompted().eval(), method, lr=0.01)
    for count in (8, 10, 10, 5):
        assert adapter(torch.rand(count, 3, 16, 16), texts=texts).shape == (count, 10)


def test_a_repeated_batch_that_changes_the_classes_is_refused() -> None:
    texts = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
    for classes in (None, range(7)):
        adapter = poem.adapt(Prompted().eval(), "auto", lr=0.01, classes=classes)
        with pytest.raises(ValueError, match=r"expected 10 classes, as in a plain pass, got .*'texts' has 10 rows"):
            adapter(torch.rand(10, 3, 16, 16), texts=texts)
        assert adapter.totals.batches == 0
        assert adapter(torch.rand(8, 3, 16, 16), texts=texts).shape == (8, 7 if classes else 10)


class Scaled(nn.Module):
    """Images, and a factor for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.body(x if scale is None else x * scale[:, None, None, None]).mean((2, 3)))
        return logits


def test_statistics_are_measured_on_each_batch_of_a_mixed_stream() -> None:
    drawn = torch.Generator().manual_seed(0)
    one, two = torch.rand(8, 3, 16, 16, generator=drawn), 5 * torch.rand(8, 3, 16, 16, generator=drawn)
    mixed = [{"x": one, "scale": torch.ones(8)}, two]
    averages = []
    for stream in (mixed, [one, two]):
        adapter = poem.adapt(Scaled().eval(), "tent")
        layer = adapter.export(statistics="frozen", stream=stream).get_submodule("heads.0.body.1")
        averages.append(layer.running_mean)
    torch.testing.assert_close(*averages)


def test_the_source_keeps_no_hold_of_the_arguments() -> None:
    adapter, scale = poem.adapt(Scaled().eval(), "tent"), torch.ones(8)
    adapter.source(torch.rand(8, 3, 16, 16), scale=scale)
    assert adapter._network.given is None


def test_a_mapping_keywords_and_a_dictionary_model_are_one_and_the_same() -> None:
    values, labels = data("series"), torch.arange(16)
    calls: list[tuple[nn.Module, Callable[[Any], Tensor]]] = [
        (Masked(), lambda adapter: adapter(values=values, mask=masks())),
        (Masked(), lambda adapter: adapter({"mask": masks(), "values": values})),
        (Masked(), lambda adapter: adapter({"mask": masks(), "values": values, "labels": labels})),
        (Masked(), lambda adapter: adapter({"values": values}, mask=masks())),
        (Masked(), lambda adapter: next(adapter.stream([({"values": values, "mask": masks()}, labels)]))),
        (Masked(), lambda adapter: adapter.as_module()(values=values, mask=masks())),
        (OfDictionary(), lambda adapter: adapter({"mask": masks(), "values": values, "labels": labels})),
    ]
    answers = []
    for net, call in calls:
        adapter = poem.adapt(net.eval(), "tent", lr=0.01)
        call(adapter)
        answers.append(call(adapter))
        assert adapter.totals.updates == 2
    assert all(torch.equal(answers[0], each) for each in answers)


def test_check_takes_what_the_adapter_takes() -> None:
    """A mapping in batches, with the mask of each sample, beside the same network with the mask inside its tensor."""
    one, other = poem.adapt(Masked().eval(), "tent", lr=0.05), poem.adapt(ByHand(Masked().eval()), "tent", lr=0.05)
    values, labels = data("series", seed=1), torch.arange(16) % 5
    joined = torch.cat([values, masks()[..., None].float()], dim=2)
    one(values=values, mask=masks())
    other(joined)
    before = one.state_dict()
    named = {"values": values, "mask": masks(), "labels": labels}
    found = poem.check(one, named, labels, batch_size=6)
    assert found == poem.check(other, joined, labels, batch_size=6)
    assert found == poem.check(one, UserDict(named), labels, batch_size=6), "as Hugging Face's batches are"
    assert_same_state(one.state_dict(), before)
    guarded = poem.guard(one)
    assert poem.check(guarded, named, labels, batch_size=6).n == 16
    with pytest.raises(TypeError, match="Masked takes no argument 'image'"):
        poem.check(one, {"image": values}, labels)
    with pytest.raises(ValueError, match="expected one label for each of 16 images, got 3"):
        poem.check(one, named, labels[:3])
    with pytest.raises(
        TypeError, match=r"expected images as one tensor .*, or a mapping of the model's arguments, got"
    ):
        poem.check(one, [values], labels)  # type: ignore[arg-type]


def test_check_cuts_no_argument_that_all_samples_share() -> None:
    texts = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
    adapter = poem.adapt(Prompted().eval(), "tent", lr=0.01)
    adapter(torch.rand(8, 3, 16, 16), texts=texts)
    named = {"x": torch.rand(10, 3, 16, 16), "texts": texts}
    assert poem.check(adapter, named, torch.arange(10), batch_size=5).n == 10


def test_the_first_parameter_by_its_name_is_the_plain_call() -> None:
    adapter = poem.adapt(Raw(), "tent", lr=0.01)
    plain = poem.adapt(Raw(), "tent", lr=0.01)
    waves = data("audio")[:, 0]
    assert torch.equal(adapter(waves=waves), plain(waves))
    assert adapter._network.given is None
    assert torch.equal(adapter(images=waves), plain(waves)), "the adapter's own name for the batch"


def test_flags_reach_the_model() -> None:
    adapter = poem.adapt(Masked().eval(), "source")
    values = data("series")
    torch.testing.assert_close(adapter(values=values, double=True), 2 * adapter(values=values))


def test_fisher_information_is_measured_on_mappings() -> None:
    batches = [{"values": data("series", seed=seed), "mask": masks(), "labels": torch.zeros(16)} for seed in (5, 6)]
    joined = [torch.cat([each["values"], each["mask"][..., None].float()], dim=2) for each in batches]
    one = poem.adapt(Masked().eval(), "eata", source_data=batches)
    other = poem.adapt(ByHand(Masked().eval()), "eata", source_data=joined)
    assert one.preparation == other.preparation == {"forwards": 32, "backwards": 32}
    mine, theirs = (list(each._state.prepared.values()) for each in (one, other))
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left, right)


def test_a_state_of_keywords_is_saved_and_continued(tmp_path: Path) -> None:
    def call(adapter: poem.Adapter, seed: int) -> Tensor:
        return adapter(values=data("series", seed=seed), mask=masks())

    adapter = poem.adapt(Masked().eval(), "poem", threshold=0.9, lr=0.01)
    call(adapter, 1)
    adapter.save(tmp_path / "state")
    again = poem.adapt(Masked().eval(), "poem", threshold=0.9, lr=0.01)
    again.load(tmp_path / "state")
    assert torch.equal(call(adapter, 2), call(again, 2))


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({}, TypeError, r"expected a batch, got no argument; call adapter\(x\)"),
        ({"labels": torch.zeros(16)}, TypeError, "expected a batch, got no argument"),
        (
            {"values": data("series"), "msk": masks()},
            TypeError,
            "Masked takes no argument 'msk'; it takes mask, values",
        ),
        ({"mask": masks()}, TypeError, r"floating-point tensor .*got mask of torch.int64; embed them first"),
        ({"double": True}, TypeError, "floating-point tensor .*got double"),
        ({"values": data("series") * torch.nan, "mask": masks()}, ValueError, "NaN or Inf in sample 0"),
        ({"values": data("series"), "mask": masks() * torch.nan}, ValueError, "expected mask without NaN"),
        ({"values": data("series"), "mask": masks().to("meta")}, ValueError, "expected mask on cpu.*got meta"),
        ({"values": data("series")[:0], "mask": masks()}, ValueError, "at least one"),
    ],
)
def test_bad_arguments_are_refused_and_leave_no_trace(arguments: dict[str, Any], kind: type, words: str) -> None:
    adapter = poem.adapt(Masked().eval(), "tent", lr=0.01)
    adapter(values=data("series"), mask=masks())
    before = snapshot(adapter)
    with pytest.raises(kind, match=words):
        adapter(**arguments)
    assert snapshot(adapter) == before
    adapter(values=data("series"), mask=masks())
    assert adapter.totals.updates == 2


def test_keys_that_are_no_names_are_refused() -> None:
    with pytest.raises(TypeError, match="from argument names to tensors, got the key 3"):
        poem.adapt(Masked().eval(), "tent")({3: data("series")})  # type: ignore[dict-item]


class Two(nn.Module):
    """Images, and a number for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.GroupNorm(2, 8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip

    def forward(self, images: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        logits: Tensor = self.net(images)
        return logits * (gain[:, None] if isinstance(gain, Tensor) else gain)


def test_views_have_no_rows_of_what_goes_along() -> None:
    images = torch.rand(4, 3, 32, 32)
    unit: dict[str, Any] = {"mean": (0.0,), "std": (1.0,)}
    adapter = poem.adapt(Two().eval(), "memo", lr=0.001, **unit)
    before = snapshot(adapter)
    with pytest.raises(ValueError, match=r"memo learns from other images .*'gain' has no rows; leave it out, or use"):
        adapter(images, gain=torch.ones(4))
    assert snapshot(adapter) == before
    assert adapter(images, gain=2.0).shape == (4, 5)
    poem.adapt(Two().eval(), "deyo", **unit)(images, gain=torch.ones(4))  # destroyed images are the batch's, row by row


def test_more_than_one_tensor_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "DEVICES", ("cpu",))
    adapter = poem.adapt(Masked().eval(), "tent", fast=True)
    adapter(values=data("series"), mask=masks())
    assert adapter.last.notes == [
        "not captured: the model is called with more than one tensor, and a replay copies one"
    ]


# The guard -----------------------------------------------------------------------------------------------------------


def test_a_guard_looks_at_no_shifted_table_and_says_so_once() -> None:
    guard = poem.adapt(table(), "tent", lr=0.01, guard=True)
    for seed in range(1, 5):
        assert guard(data("table", seed=seed)).shape == (16, 5)
    told = [event for event in guard.events if event.kind == "view"]
    assert len(told) == 1
    assert told[0].batch == 0
    assert "no batch of images" in told[0].why
    quiet = poem.adapt(table(), "tent", lr=0.01, guard={"view": "none"})
    for seed in range(1, 5):
        answer = quiet(data("table", seed=seed))
    assert [event.kind for event in quiet.events if event.kind == "view"] == []
    guard.reset()
    for seed in range(1, 5):
        again = guard(data("table", seed=seed))
    assert torch.equal(again, answer)


def test_a_guard_takes_keywords(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    guard = poem.adapt(
        Masked().eval(), "tent", lr=0.01,
        guard={"audit": audit, "source_data": [{"values": data("series", seed=9), "mask": masks()}]},
    )  # fmt: skip
    for seed in (1, 2):
        values = data("series", seed=seed)
        assert guard(values=values, mask=masks()).shape == (16, 5)
    with guard.frozen():
        assert torch.equal(guard(values=values, mask=masks()), guard({"mask": masks(), "values": values}))
    assert guard.source(values=values, mask=masks()).shape == (16, 5)
    hashes = [line.partition('"images":')[2][:20] for line in audit.read_text().splitlines() if '"images"' in line]
    guard.reset()
    guard(values=data("series", seed=1), mask=masks().flip(0))
    more = [line.partition('"images":')[2][:20] for line in audit.read_text().splitlines() if '"images"' in line]
    assert len({*hashes, *more}) == 3, "another mask is another batch"


def test_a_guard_looks_at_shifted_images_beside_arguments() -> None:
    guard, plain = (poem.adapt(Two().eval(), "tent", lr=0.01, guard=True) for _ in range(2))
    for seed in (1, 2):
        images = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(guard(images, gain=torch.ones(8)), plain(images))
    assert guard.signals is not None
    assert guard.signals.source_steadiness
    assert not guard.events


# Told at the door ----------------------------------------------------------------------------------------------------


class Answers(nn.Module):
    """Images to whatever `made` gives."""

    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.norm, self.made = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), made

    def forward(self, x: Tensor) -> Any:
        return self.made(self.norm(self.conv(x)))


@pytest.mark.parametrize(
    ("made", "kind", "words"),
    [
        (lambda x: x, ValueError, r"got \(4, 8, 8, 8\); pass logits=lambda out: out.mean\(\(2, 3\)\).*each pixel"),
        (lambda x: {"out": x, "aux": x}, TypeError, r"'out' of shape \(4, 8, 8, 8\): Answers segments.*\['out'\].mean"),
        (lambda x: x.flatten(2), ValueError, r"got \(4, 8, 64\); pass logits=lambda out: out\[:, 0\] or out.mean\(1\)"),
        (
            lambda x: [{"boxes": x, "labels": x, "scores": x}] * 4,
            TypeError,
            "got list of boxes, labels and scores: Answers detects, and a list of boxes has no entropy",
        ),
        (lambda x: {"a": x, "b": x}, TypeError, r"got dict with 'a', 'b'; pass logits=lambda out: \.\.\."),
    ],
    ids=["segmentation", "torchvision segmentation", "tokens", "detection", "unknown"],
)
def test_answers_that_no_method_adapts_by_are_told_apart(made: Any, kind: type[Exception], words: str) -> None:
    adapter = poem.adapt(Answers(made).eval(), "tent")
    before = snapshot(adapter)
    with pytest.raises(kind, match=words):
        adapter(torch.rand(4, 3, 16, 16))
    assert snapshot(adapter) == before


def test_a_segmentation_network_is_adapted_by_its_mean_prediction() -> None:
    adapter = poem.adapt(Answers(lambda x: {"out": x}).eval(), "tent", logits=lambda out: out["out"].mean((2, 3)))
    assert adapter(torch.rand(4, 3, 16, 16)).shape == (4, 8)
    assert adapter.totals.updates == 1


class Text(nn.Module):
    """Token ids to logits, or their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.net = nn.Embedding(50, 6), Masked()

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        values = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        logits: Tensor = self.net(mask=attention_mask, values=values)["logits"]
        return logits


def test_token_ids_are_told_to_be_embedded_and_that_works() -> None:
    model, ids = Text().eval(), torch.randint(50, (16, 10), generator=torch.Generator().manual_seed(1))
    adapter = poem.adapt(model, "tent", lr=0.01)
    before = snapshot(adapter)
    told = r"embed them first, as in adapter\(inputs_embeds=model.get_input_embeddings\(\)\(input_ids\)"
    with pytest.raises(ValueError, match=rf"got torch.int64: token ids have no gradient; {told}"):
        adapter(ids)
    with pytest.raises(TypeError, match=rf"got input_ids of torch.int64, attention_mask of torch.int64; {told}"):
        adapter(input_ids=ids, attention_mask=masks())
    assert snapshot(adapter) == before
    answer = adapter(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=masks())
    torch.testing.assert_close(answer, model(input_ids=ids, attention_mask=masks()))
    assert adapter.totals.updates == 1


class TwoTowers(nn.Module):
    """Built like CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(512, 16))
        self.words = nn.EmbeddingBag(50, 16)

    def encode_image(self, image: Tensor) -> Tensor:
        features: Tensor = self.visual(image)
        return features

    def encode_text(self, text: Tensor) -> Tensor:
        features: Tensor = self.words(text)
        return features

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        one, other = F.normalize(self.encode_image(image), dim=1), F.normalize(self.encode_text(text), dim=1)
        return one @ other.T


class Finished(TwoTowers):
    """A classifier that has both methods, and wants images alone."""

    def forward(self, image: Tensor) -> Tensor:  # type: ignore[override]
        return self.encode_image(image)


def test_a_model_of_two_towers_is_refused_with_the_wrapper() -> None:
    with pytest.raises(TypeError, match=r"got TwoTowers, which compares images with texts; wrap .*examples/05_clip.py"):
        poem.adapt(TwoTowers(), "tent")
    assert poem.adapt(Finished(), "tent")(torch.rand(4, 3, 32, 32)).shape == (4, 16)


def test_patches_need_images_of_some_size() -> None:
    """DeYO on a table, or on images smaller than its tiles, is one plain error; others learn from the same table."""
    small = poem.adapt(Two().eval(), "deyo")
    before = snapshot(small)
    with pytest.raises(
        ValueError, match=r"deyo cuts images into 4 x 4 tiles .*got images of \(3, 9\) pixels; pass larger"
    ):
        small(torch.rand(2, 3, 3, 9))
    assert snapshot(small) == before
    adapter = poem.adapt(table(), "deyo", select=EntropyBelow(0.9))
    with pytest.raises(ValueError, match=r"deyo needs images .* got shape \(16, 12\)"):
        adapter(data("table"))
    tuned = poem.adapt(table(), "tent", parameters=Everything(), statistics=RunningMean(0.1), lr=1e-4)
    tuned(data("table"))
    assert tuned.totals.updates == 1


def test_a_plain_tensor_makes_no_further_pass(caplog: pytest.LogCaptureFixture) -> None:
    adapter, passes = poem.adapt(table(), "tent"), 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    adapter.model.register_forward_hook(count)
    with caplog.at_level(logging.WARNING, "poem"):
        adapter(data("table"))
    assert passes == 1
    assert not caplog.records
