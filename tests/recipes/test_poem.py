"""POEM by hand: two heads, two losses, a branch with a loss of its own, and sets that are compared as sets."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from by_hand import (
    E0,
    LR,
    NETS,
    Bright,
    ByHand,
    adapted,
    assert_same,
    differs,
    moved,
    net,
    stream,
    with_batch_statistics,
)
from dial import Dial, spots
from nets import ConvNet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from toys import images

import poem
from poem.adapter import Adapter
from poem.engine.anatomy import anatomy
from poem.parts import (
    AdaptBranch,
    ByEntropy,
    Equal,
    Objective,
    Selected,
)


@dataclass(frozen=True, repr=False)
class Nil(Objective):
    """Asks for nothing."""

    def __call__(self, selected: Selected) -> Tensor:
        return 0 * selected.outputs.logits.sum()


@pytest.mark.parametrize("kind", NETS)
def test_the_entropy_moves_the_shallow_layers_only_and_the_cross_entropy_the_branch_only(kind: str) -> None:
    batches = stream()
    both = adapted(kind, "poem", rounds=1)
    only_theta = adapted(kind, "poem", rounds=1, branch=AdaptBranch(teach=Nil()))
    only_zeta = adapted(kind, "poem", rounds=1, minimise=Nil())
    start = moved(both)
    zeta = [name for name in start if name.startswith("branch.")]
    theta = [name for name in start if not name.startswith("branch.")]
    for adapter in (both, only_theta, only_zeta):
        adapter(batches[0])
        assert adapter.last.updates == 1

    def assert_moved(adapter: Adapter, names: list[str], as_in: dict[str, Tensor], changed: bool) -> None:
        now = {name: moved(adapter)[name] for name in names}
        for name in names:
            torch.testing.assert_close(now[name], as_in[name], rtol=1e-12, atol=1e-12)
        assert differs(now, start) == changed

    assert_moved(only_theta, theta, moved(both), changed=True)
    assert_moved(only_zeta, zeta, moved(both), changed=True)
    assert_moved(only_theta, zeta, start, changed=False)
    assert_moved(only_zeta, theta, start, changed=False)


def test_poem_by_hand_on_both_heads() -> None:
    """Three batches, one update each: mean entropy of y for the shallow layers, CE(p_A, argmax y) for the branch."""
    adapter = adapted("gn", "poem", rounds=1, readout="first")
    hand = ByHand(net("gn"), top=False)
    shallow = hand.model
    assert isinstance(shallow, ConvNet)
    deep = copy.deepcopy(shallow.layer4).requires_grad_(False)
    norms = {name for name, m in deep.named_modules() if isinstance(m, nn.GroupNorm)}
    zeta = {n: p.requires_grad_() for n, p in deep.named_parameters() if n.rpartition(".")[0] in norms}
    speed = {key: torch.zeros_like(p) for key, p in (*hand.named.items(), *zeta.items())}
    for batch in stream():
        x = torch.relu(shallow.norm1(shallow.conv1(batch)))
        x = shallow.layer3(shallow.layer2(shallow.layer1(x)))
        source, branch = (shallow.fc(part(x).mean((2, 3))) for part in (shallow.layer4, deep))
        y = 0.5 * source.softmax(1) + 0.5 * branch.softmax(1)
        h = -(y * y.log()).sum(1)
        sure = h.detach() < E0
        assert 0 < int(sure.sum()) < 12
        first = torch.autograd.grad(h[sure].mean(), list(hand.named.values()), retain_graph=True)
        second = torch.autograd.grad(cross_entropy(branch[sure], y.detach().argmax(1)[sure]), list(zeta.values()))
        for (key, p), g in zip((*hand.named.items(), *zeta.items()), (*first, *second), strict=True):
            speed[key] = 0.9 * speed[key] + g
            with torch.no_grad():
                p.sub_(LR["gn"] * speed[key])
        torch.testing.assert_close(adapter(batch), y.detach().log(), rtol=1e-9, atol=1e-9)
        assert torch.equal(adapter.last.selected, sure)
        hand.assert_equals(adapter)
        for name, p in zeta.items():
            torch.testing.assert_close(moved(adapter)[f"branch.layer4.{name}"], p.detach(), rtol=1e-9, atol=1e-11)


def test_the_weights_of_a_host_do_not_reach_the_branch() -> None:
    """Selected samples count the same for the cross-entropy, whatever their weight for the entropy."""
    (batch, *_) = stream()
    equal, weighed = (adapted("gn", "tent+poem", rounds=1, weigh=weigh) for weigh in (Equal(), ByEntropy(0.4)))
    equal(batch), weighed(batch)
    one, other = moved(equal), moved(weighed)
    zeta = [name for name in one if name.startswith("branch.")]
    assert zeta
    assert_same({name: one[name] for name in zeta}, {name: other[name] for name in zeta})
    assert differs({name: one[name] for name in one if name not in zeta}, other)


def test_poem_compares_sets_and_not_their_sizes() -> None:
    """One enters as one leaves: four before, four after, and another update all the same."""
    adapter = poem.adapt(Dial(), "poem", lr=5.0)
    adapter(spots(3, 3, 3, 2.3, -2.6))
    assert adapter.last.newly_reliable.sum() == adapter.last.no_longer_reliable.sum() == 1
    assert adapter.last.updates == 2


@pytest.mark.parametrize("kind", NETS)
def test_poem_leaves_the_source_head_as_it_came(kind: str) -> None:
    model = net(kind)
    before = copy.deepcopy(model.state_dict())
    select = Bright()
    adapter = poem.adapt(model, "poem", lr=LR[kind], select=select)
    for batch in stream():
        adapter(batch)
    now = moved(adapter)
    facts = anatomy(model)
    deep = facts.modules[facts.modules.index(facts.split()) :]
    assert not [name for name in now if name.rpartition(".")[0] in deep]
    assert differs({name: value for name, value in now.items() if name.startswith("branch.")},
                   {f"branch.{name}": value for name, value in before.items()})  # fmt: skip
    assert_same(dict(model.state_dict()), dict(before))
    # The first head is the network with its shallow layers moved and its deep ones untouched.
    hand = with_batch_statistics(model)
    outputs = select.seen[-1][0]
    with torch.no_grad():
        for name, parameter in hand.named_parameters():
            parameter.copy_(now.get(name, before[name]))
        batch = outputs.batch.images
        torch.testing.assert_close(outputs.heads[0].detach(), hand(batch), rtol=1e-9, atol=1e-9)
        for name, parameter in hand.named_parameters():
            parameter.copy_(now.get(f"branch.{name}", parameter))
        torch.testing.assert_close(outputs.heads[1].detach(), hand(batch), rtol=1e-9, atol=1e-9)
    assert (outputs.heads[0] - outputs.heads[1]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["gn", "ln"])
def test_a_single_image_makes_at_most_one_update_of_poem(kind: str) -> None:
    """The set is the image or empty, so after one update it is the same or empty."""
    adapter = adapted(kind, "poem", lr=LR[kind] / 10)
    for image in torch.split(images(12, seed=1).double(), 1):
        adapter(image)
        assert adapter.last.updates == int(adapter.last.selected.sum()) <= 1
        assert not bool(adapter.last.newly_reliable.any())
    assert 0 < adapter.totals.updates < 12
