"""A model with one logit per image, whose sigmoid is the probability of class 1, adapts as a model of two classes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import capturing
from learners import UNIT, batch, snapshot
from nets import make_net
from torch import Tensor, nn

import poem
from poem.engine.network import log_odds, two_columns
from poem.parts import Everyone, Everything
from poem.predict import answers, class_count
from poem.streams.loading.prepare import Prepare

KINDS = ("bn", "gn", "ln")
SHARPNESS = {"bn": 10.0, "gn": 10.0, "ln": 20.0}
LR = {"bn": 0.02, "gn": 0.02, "ln": 0.002}
EVERYTHING = ("memo", "cotta")  # these adapt the head too, of which the other net has one row more
METHODS = ("tent", "poem", "sar", "deyo", "eta", "roid", "rotta", "lame", "neo", "bn", "deyo+poem", "sar+poem")


def head(net: nn.Module) -> nn.Linear:
    found = net.fc if hasattr(net, "fc") else net.head
    assert isinstance(found, nn.Linear)
    return found


def one_logit(kind: str) -> nn.Module:
    """A net with logits (B, 1) on both sides of 0, in double precision."""
    net = make_net(kind, classes=1, sharpness=SHARPNESS[kind]).double()
    with torch.no_grad():
        head(net).bias.sub_(net(batch(64, seed=3).double()).median())
    return net


def two_logits(net: nn.Module) -> nn.Module:
    """The same net with a head of two logits, (0, z)."""
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for name in ("weight", "bias"):
            row = getattr(head(net), name)
            setattr(head(twin), name, nn.Parameter(torch.cat([torch.zeros_like(row), row])))
    return twin


def adapter_of(kind: str, method: str | poem.Recipe, net: nn.Module | None = None, **changes: Any) -> poem.Adapter:
    settings: dict[str, Any] = {"lr": LR[kind], **UNIT, **changes}
    return poem.adapt(one_logit(kind) if net is None else net, method, guard=False, **settings)


def images(count: int = 12, seed: int = 1) -> Tensor:
    return batch(count, seed=seed).double()


def moved(adapter: poem.Adapter) -> dict[str, Tensor]:
    return {name: each for name, each in adapter.state_dict()["tensors"].items() if name.startswith("moved/")}


def changed(adapter: poem.Adapter, fresh: poem.Adapter) -> bool:
    return any(not torch.equal(each, moved(fresh)[name]) for name, each in moved(adapter).items())


@pytest.mark.parametrize(
    ("kind", "method"),
    [*((kind, method) for kind in ("bn", "gn") for method in METHODS), ("ln", "tent"), ("ln", "poem"), ("ln", "sar")],
)
def test_one_logit_adapts_as_the_same_net_with_two(kind: str, method: str) -> None:
    net = one_logit(kind)
    one, two = adapter_of(kind, method, net), adapter_of(kind, method, two_logits(net))
    for seed in range(3):
        mine, theirs = one(images(seed=seed)), two(images(seed=seed))
        assert mine.shape == (12, 1)
        assert torch.allclose(mine, theirs[:, 1:] - theirs[:, :1], atol=1e-6)
        assert one.last.first_logits.shape[1] == 2
        assert torch.equal(one.last.selected, two.last.selected)
        assert torch.allclose(one.last.first_entropy, two.last.first_entropy, atol=1e-6)
    assert one.totals == two.totals
    others = moved(two)
    for name, tensor in moved(one).items():
        assert torch.allclose(tensor, others[name], atol=1e-6), name
    assert torch.allclose(one.gradient_norms(images()), two.gradient_norms(images()), atol=1e-6)
    with one.frozen(), two.frozen():
        assert torch.allclose(one(images()), log_odds(two(images())), atol=1e-6)


@pytest.mark.parametrize("kind", ["bn", "gn"])
@pytest.mark.parametrize("method", ["tent", "poem", "sar", "deyo", "eta", "roid", "zerosiam", *EVERYTHING])
def test_updates_change_parameters(kind: str, method: str) -> None:
    more: dict[str, Any] = {"threshold": 0.9} if method in ("poem", "sar", "deyo", "eta") else {}
    adapter = adapter_of(kind, method, **more)
    assert adapter(images()).shape == (12, 1)
    assert float(adapter.last.first_entropy.max()) > 0.1
    adapter(images(seed=2))
    assert adapter.totals.taught > 0
    assert adapter.totals.idle == 0
    if method != "memo":  # which returns to the source after every image
        assert changed(adapter, adapter_of(kind, method))
    else:
        with adapter.frozen():
            assert not torch.allclose(adapter(images()), adapter_of(kind, method)(images()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_source_is_the_model_to_the_bit(kind: str) -> None:
    net = one_logit(kind)
    with torch.no_grad():
        expected = net(images())
    adapter = adapter_of(kind, "poem", net)
    adapter(images(seed=2))
    assert torch.equal(adapter.source(images()), expected)
    assert torch.equal(adapter_of(kind, "source", net)(images()), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["tent", "poem", "deyo+poem"])
def test_an_export_answers_as_the_frozen_adapter(kind: str, method: str) -> None:
    adapter = adapter_of(kind, method, select=Everyone())
    adapter(images())
    with adapter.frozen(), torch.no_grad():
        answer = adapter(images(seed=2))
        exported = adapter.export()(images(seed=2))
    assert exported.shape == (12, 1)
    assert torch.allclose(exported, answer, atol=1e-9)
    assert not torch.allclose(exported, adapter.source(images(seed=2)), atol=1e-6)


@pytest.mark.parametrize("method", ["tent", "poem"])
def test_a_state_goes_on_elsewhere(method: str, tmp_path: Path) -> None:
    adapter, other = adapter_of("bn", method), adapter_of("bn", method)
    adapter(images())
    adapter.save(tmp_path / "state")
    other.load(tmp_path / "state")
    assert other.state_dict()["classes"] == 2
    assert torch.equal(adapter(images(seed=2)), other(images(seed=2)))
    copied = copy.deepcopy(adapter)
    assert torch.equal(adapter(images(seed=4)), copied(images(seed=4)))
    adapter.reset()
    assert torch.equal(adapter(images()), adapter_of("bn", method)(images()))


@pytest.mark.parametrize("kind", ["bn", "gn"])
@pytest.mark.parametrize("method", ["tent", "poem", "sar"])
def test_the_captured_loop_gives_the_same_answers(kind: str, method: str) -> None:
    with capturing("cpu"):
        captured, eager = (adapter_of(kind, method, fast=fast, select=Everyone()) for fast in (True, False))
        for seed in range(4):
            answer = captured(images(seed=seed))
            assert answer.shape == (12, 1)
            assert torch.equal(answer, eager(images(seed=seed)))
        assert captured.last.notes == []
        with captured.frozen(), eager.frozen():
            assert torch.equal(captured(images()), eager(images()))
        assert snapshot(captured) == snapshot(eager)


def test_fewer_dimensions_say_how_to_pass_one_logit() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = one_logit("gn")

        def forward(self, x: Tensor) -> Tensor:
            flat: Tensor = self.net(x)[:, 0]
            return flat

    with pytest.raises(ValueError, match=r"got \(12,\); pass logits=lambda out: out\[:, None\]"):
        adapter_of("gn", "tent", Flat())(images())
    flat = adapter_of("gn", "tent", Flat(), logits=lambda out: out[:, None])
    assert torch.equal(flat(images()), adapter_of("gn", "tent")(images()))


@pytest.mark.parametrize("classes", [[0], [0, 1]])
def test_a_class_mask_is_refused(classes: list[int]) -> None:
    adapter = adapter_of("gn", "tent", classes=classes)
    for ask in (adapter, adapter.source):
        with pytest.raises(ValueError, match="got one per image, which the adapter reads as two classes"):
            ask(images())


@pytest.mark.parametrize("method", ["come", "come+poem"])
def test_a_method_that_cannot_learn_from_one_logit_says_so(method: str) -> None:
    adapter = adapter_of("gn", method)
    with pytest.raises(ValueError, match="needs a model with several logits"):
        adapter(images())
    assert adapter.totals.batches == 0
    assert adapter.source(images()).shape == (12, 1)
    adapter_of("gn", method, two_logits(one_logit("gn")))(images())


def test_a_certain_answer_is_finite_and_a_broken_one_is_not() -> None:
    inf, nan = torch.inf, torch.nan
    odds = log_odds(torch.tensor([[-inf, 0.0], [0.0, -inf], [0.0, inf], [0.0, nan], [-1.0, 2.5]]))
    assert odds[0].isfinite()
    assert odds[0] > 1e30
    assert odds[1] == -inf
    assert odds[2] == inf
    assert odds[3].isnan()
    assert odds[4] == 3.5
    assert two_columns(odds).amax(1).isfinite().tolist() == [True, True, False, False, True]


# Labels -----------------------------------------------------------------------------------------------------------


def loader(net: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Batches of images, labelled as the net says but for every fifth."""
    found = []
    for seed in range(3):
        with torch.no_grad():
            labels = (net(images(20, seed=seed))[:, 0] > 0).long()
        labels[::5] = 1 - labels[::5]
        assert 0 < labels.float().mean() < 1
        found.append((images(20, seed=seed), labels))
    return found


def test_evaluate_scores_one_logit_by_its_sign() -> None:
    net = one_logit("bn")
    data = loader(net)
    table = poem.evaluate(net, data, ["source", "tent", "poem"], lr=0.05)
    other = poem.evaluate(two_logits(net), data, ["source", "tent", "poem"], lr=0.05)
    assert table["source"].accuracy == pytest.approx(80.0)
    for row in table:
        theirs = other[row.method]
        assert (row.accuracy, row.n, row.forwards, row.backwards) == (
            theirs.accuracy, theirs.n, theirs.forwards, theirs.backwards,
        )  # fmt: skip
        assert row.nll == pytest.approx(theirs.nll)
        assert row.ece == pytest.approx(theirs.ece)
        assert row.nonfinite == 0


@pytest.mark.parametrize("form", ["column", "float", "one-hot", "bool"])
def test_evaluate_takes_the_labels_that_people_have_for_one_logit(form: str) -> None:
    net = one_logit("gn")
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "column": lambda y: y[:, None], "float": lambda y: y[:, None].float(),
        "one-hot": lambda y: nn.functional.one_hot(y, 2), "bool": lambda y: y.bool(),
    }  # fmt: skip
    data = [(x, forms[form](y)) for x, y in loader(net)]
    assert poem.evaluate(net, data, "source")["source"].accuracy == pytest.approx(80.0)


def test_evaluate_refuses_a_third_class() -> None:
    with pytest.raises(ValueError, match=r"expected labels 0\.\.1, got 0\.\.2"):
        poem.evaluate(one_logit("gn"), [(images(3), torch.tensor([0, 1, 2]))], "source")


@pytest.mark.parametrize("method", ["source", "tent"])
def test_predictions_have_the_probability_of_the_likelier_class(method: str, tmp_path: Path) -> None:
    from PIL import Image

    net = one_logit("gn").float()
    for at, image in enumerate((batch(8, seed=2) * 255).round().byte()):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{at}.png")
    files = sorted(tmp_path.glob("*.png"))
    (found,) = answers(net, files, method, prepare=Prepare(), folder=tmp_path, batch_size=8, names={0: "no", 1: "yes"})
    with torch.no_grad():
        z = net((batch(8, seed=2) * 255).round() / 255)[:, 0]
    assert {each.source_label for each in found} == {0, 1}
    assert [each.source_label for each in found] == (z > 0).long().tolist()
    assert [each.source_name for each in found] == ["yes" if each > 0 else "no" for each in z]
    assert all(each.confidence is not None and 0.5 <= each.confidence <= 1 for each in found)
    if method == "source":
        assert [each.confidence for each in found] == pytest.approx(z.abs().sigmoid().tolist(), abs=1e-5)
        assert any(each.entropy is not None and each.entropy > 0.05 for each in found)
    assert class_count(net) == 2


def test_everything_includes_the_head() -> None:
    adapter = adapter_of("gn", "tent", parameters=Everything())
    adapter(images())
    assert "fc.weight" in adapter.adapted
    assert changed(adapter, adapter_of("gn", "tent", parameters=Everything()))
