"""Facts about the adapter and the borrowed network that no single part shows."""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any

import pytest
import torch
import toys
from by_hand import LR, NETS, SHARPNESS, Bright, adapted, assert_same, eight_views, moved, net, stream, tensors
from inside import doubles
from learners import LOOSE, batch, learner, sharp, snapshot
from nets import ConvNet, make_net
from torch import Tensor, nn

import poem
from poem.parts import (
    AdaptBranch,
    AverageWithSource,
    EntropyBelow,
    Laplacian,
    LossAverageBelow,
    Memory,
    NotRedundant,
    Objective,
    Outputs,
    PLPDAbove,
    Readout,
    Repeat,
    Select,
    Selected,
)
from poem.recipes.text import parse

UNIT: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def images(count: int = 8, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


class Encoder(nn.Module):
    """A network of torch's own transformer layers, which have a fused path of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0) for _ in range(6)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            tokens = layer(tokens)
        logits: Tensor = self.head(tokens.mean(1))
        return logits


def test_fused_transformer_layers_do_not_read_past_the_branch() -> None:
    """A forward pass without gradient, which torch would fuse, sees the same branch as one with it."""
    torch.manual_seed(0)
    adapter = poem.adapt(Encoder().eval(), "poem", threshold=2.0, lr=0.5, depth=3)
    adapter(images())
    assert adapter.last.updates > 0
    with adapter.frozen():
        plain = adapter(images(seed=1))
    still = poem.adapt(adapter.model, "poem", threshold=2.0, lr=0.0, depth=3, readout="first")
    state = still.state_dict()
    learnt = adapter.state_dict()["tensors"]
    state["tensors"] |= {name: tensor for name, tensor in learnt.items() if name.startswith("moved/")}
    still.load_state_dict(state)
    assert torch.allclose(still(images(seed=1)), plain, atol=1e-5)
    source = poem.adapt(adapter.model, "source")(images(seed=1)).log_softmax(1)
    assert not torch.allclose(plain, source, atol=1e-3)


class ReadsWeights(nn.Module):
    """Uses its norm layers' weights without calling the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net("ln")

    def forward(self, x: Tensor) -> Tensor:
        net: Any = self.net
        tokens = net.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([net.token.expand(len(x), -1, -1), tokens], dim=1) + net.position
        tokens = net.blocks(tokens)
        final = nn.functional.layer_norm(tokens, (16,), net.norm.weight, net.norm.bias)
        logits: Tensor = net.head(final[:, 0])
        return logits


def test_a_branch_layer_that_is_never_called_is_an_error_not_a_branch_that_never_moves() -> None:
    adapter = poem.adapt(ReadsWeights().eval(), "poem", threshold=2.0)
    with pytest.raises(ValueError, match=r"net.norm.*do not run through their own forward; pass split="):
        adapter(images())


def test_a_first_batch_that_fails_does_not_switch_off_the_doubled_pass() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net("gn", sharpness=6.0)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] != 16:
                raise RuntimeError("16 pixels, please")
            logits: Tensor = self.net(x)
            return logits

    adapter = poem.adapt(Picky().eval(), "poem", threshold=0.9)
    with pytest.raises(RuntimeError, match="16 pixels"):
        adapter(torch.rand(4, 3, 8, 8))
    adapter(images())
    assert adapter.last.notes == []
    assert adapter.last.forwards_computed == adapter.last.forwards


@pytest.mark.parametrize("method", ["deyo", "roid", "memo", "poem", "poem-official", "sar"])
def test_a_bfloat16_network_with_batch_norm_runs_masked_and_mixed_passes(method: str) -> None:
    net = make_net("bn", sharpness=10.0).bfloat16()
    changes: dict[str, Any] = {"views": _four} if method == "memo" else {}
    adapter = poem.adapt(net, method, **UNIT, **changes)
    answer = adapter(images(4))
    assert answer.dtype == torch.float32
    assert bool(answer.isfinite().all())
    exported = poem.adapt(net, "tent").export()
    assert exported(images(4)).dtype == torch.float32


def _four(image: Tensor, rng: torch.Generator) -> Tensor:
    return image.expand(4, -1, -1, -1)


def test_source_data_is_for_those_who_ask_for_it() -> None:
    net = make_net("bn")
    stream = [(images(), torch.zeros(8, dtype=torch.long))]
    table = poem.evaluate(net, stream, ["source", "tent", "eata"], source_data=images(16, seed=2))
    assert [row.method for row in table] == ["source", "tent", "eata"]
    assert poem.adapt(net, "tent", source_data=images()).preparation == {"forwards": 0, "backwards": 0}
    assert [row.method for row in poem.evaluate(net, stream, "tent")] == ["tent"]


def test_a_state_with_an_anchor_needs_the_same_source_data() -> None:
    data, net = images(16, seed=2), make_net("bn")
    state = poem.adapt(net, "eata", source_data=data).state_dict()
    with pytest.raises(ValueError, match="pass the same source_data="):
        poem.adapt(net, "eata").load_state_dict(state)
    poem.adapt(net, "eata", source_data=data).load_state_dict(state)


def test_a_bad_call_in_one_thread_leaves_a_good_one_in_another_alone() -> None:
    adapter = poem.adapt(make_net("bn"), "tent", lr=0.01)
    wrong = images()
    wrong[0] = torch.nan
    refused = []

    def bad() -> None:
        for _ in range(10):
            try:
                adapter(wrong)
            except ValueError:
                refused.append(1)

    other = threading.Thread(target=bad)
    other.start()
    for _ in range(10):
        adapter(images())
    other.join()
    alone = poem.adapt(make_net("bn"), "tent", lr=0.01)
    for _ in range(10):
        alone(images())
    assert len(refused) == 10
    assert adapter.totals == alone.totals
    for key, value in alone.state_dict()["tensors"].items():
        assert torch.equal(value, adapter.state_dict()["tensors"][key]), key


class SoundAtFirst(Objective):
    """An entropy that is NaN in the second round of every batch."""

    def __call__(self, selected: Selected) -> Tensor:
        return selected.mean(selected.outputs.entropy) * (1.0 if selected.outputs.round == 0 else torch.nan)


def test_a_batch_whose_second_update_fails_still_remembers_the_first() -> None:
    changes: dict[str, Any] = {"minimise": SoundAtFirst(), "explore": Repeat(2), "threshold": 2.0, "lr": 0.01}
    adapter = poem.adapt(make_net("gn"), "tent-filtered", recover=LossAverageBelow(0.0), **changes)
    adapter(images())
    assert (adapter.last.rounds, adapter.last.updates) == (2, 1)
    memory = adapter.state_dict()["tensors"]
    assert bool(memory["memory/recover.seen"])
    assert float(memory["memory/recover.mean"]) > 0
    pulled = poem.adapt(make_net("gn"), "tent-filtered", recover=AverageWithSource(0.0), **changes)
    pulled(images())
    start = poem.adapt(make_net("gn"), "tent-filtered").state_dict()["tensors"]
    for key, value in pulled.state_dict()["tensors"].items():
        if key.startswith("moved/"):
            assert torch.allclose(value, start[key], atol=1e-6), "restored to the source, because one update was made"


def test_a_compiled_model_comes_back_compiled() -> None:
    compiled: Any = torch.compile(make_net("gn"))
    adapter = poem.adapt(compiled, "tent")
    adapter(images())
    assert adapter.unload() is compiled


def test_a_laplacian_correction_goes_with_a_branch_and_not_with_a_teacher() -> None:
    adapter = poem.adapt(make_net("gn", sharpness=6.0), "poem", readout=Readout("last", Laplacian()), threshold=0.9)
    assert adapter(images()).shape == (8, 10)
    with pytest.raises(ValueError, match="reads features, which a teacher's answer has not"):
        poem.adapt(make_net("gn"), "cotta", readout=Readout("teacher", Laplacian()), **UNIT)


def test_norm_layers_may_be_called_by_keyword() -> None:
    class Spoken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.norm1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
            self.conv2, self.norm2 = nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8)
            self.fc = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm1(input=self.conv1(x)).relu()
            x = self.norm2(input=self.conv2(x)).relu()
            logits: Tensor = self.fc(x.mean((2, 3)))
            return logits

    adapter = poem.adapt(Spoken(), "poem", threshold=2.0)
    adapter(images())
    assert adapter.last.updates > 0


def test_memo_can_answer_before_its_last_update() -> None:
    answers = {
        which: poem.adapt(make_net("gn"), "memo*", views=_four, readout=which, lr=0.05, **UNIT)(images(2))
        for which in ("first", "before-last", "last")
    }
    once = poem.adapt(make_net("gn"), "memo", views=_four, lr=0.05, **UNIT)(images(2))
    source = poem.adapt(make_net("gn"), "source")(images(2))
    assert torch.allclose(answers["first"], source, atol=1e-6)
    assert torch.allclose(answers["before-last"], once, atol=1e-6)
    assert not torch.allclose(answers["last"], once, atol=1e-5)


def test_chains_of_parts_lean_to_the_left_however_they_are_written() -> None:
    a, b, c = EntropyBelow(0.5), PLPDAbove(0.1), NotRedundant(0.2)
    assert a & (b & c) == (a & b) & c
    assert parse(repr(a & (b & c))) == a & (b & c)


def test_another_batch_size_is_logged_and_a_short_last_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    adapter = poem.adapt(make_net("gn"), "tent")
    with caplog.at_level(logging.WARNING, logger="poem"):
        for count in (8, 8, 5):
            adapter(images(count))
        assert caplog.text == ""
        adapter(images(8))
        assert "other sizes" in caplog.text


def test_truth_values_are_not_class_indices() -> None:
    with pytest.raises(ValueError, match=r"use mask\.nonzero"):
        poem.adapt(make_net("bn"), "tent", classes=torch.tensor([True, False] * 5))
    adapter = poem.adapt(make_net("bn"), "tent", classes=torch.tensor([1, 3, 5]))
    assert adapter(images()).shape == (8, 3)


def test_the_branch_has_its_own_depth() -> None:
    deep = poem.adapt(make_net("ln"), "poem", branch=AdaptBranch(depth=3))
    names = [name for name in deep.adapted if name.startswith("branch.")]
    assert {name.split(".")[2] for name in names if "blocks" in name} == {"5", "6", "7"}


class Nobody(Select):
    """Selects no sample."""

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return torch.zeros_like(among)


def test_a_recipe_on_views_that_selects_nothing_still_answers_the_image() -> None:
    adapter = poem.adapt(make_net("gn"), "memo", views=_four, select=Nobody(), **UNIT)
    source = poem.adapt(make_net("gn"), "source")(images(2))
    assert torch.allclose(adapter(images(2)), source, atol=1e-6)
    assert adapter.last.skipped == "nothing selected"


@pytest.mark.parametrize("method", ["source", "tent", "sar", "poem", "memo"])
def test_a_short_last_batch_is_answered_and_its_loss_divided_by_its_own_size(method: str) -> None:
    x = toys.images(20, seed=1).double()
    adapter = adapted("gn", method, **({"views": eight_views} if method == "memo" else {}))
    answers = list(adapter.stream(torch.split(x, 8)))
    assert [len(answer) for answer in answers] == [8, 8, 4]
    assert (adapter.totals.batches, adapter.totals.images) == (3, 20)
    if method == "tent":
        assert adapter.last.loss == pytest.approx(float(adapter.last.first_entropy.sum()) / 4)
        assert adapter.last.taught == 4


@pytest.mark.parametrize("where", ["autocast", "precision", "model"])
@pytest.mark.parametrize("kind", NETS)
def test_half_precision_stays_inside_the_network(kind: str, where: str) -> None:
    select = Bright()
    model = make_net(kind, sharpness=SHARPNESS[kind])
    if where == "model":
        model = model.bfloat16()
    precision: Any = "bf16" if where == "precision" else "fp32"
    adapter = poem.adapt(model, "poem", lr=LR[kind], select=select, precision=precision)
    inside: list[torch.dtype] = []

    def note(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        inside.append(output.dtype)

    head = model.fc if isinstance(model, ConvNet) else model.get_submodule("head")
    assert isinstance(head, nn.Linear)
    handle = head.register_forward_hook(note)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "autocast"):
        answer = adapter(images(6, seed=1))
    handle.remove()
    assert torch.bfloat16 in inside, "nothing ran in half precision"
    assert answer.dtype == torch.float32
    outputs = select.seen[0][0]
    for found in (outputs.logits, outputs.probs, outputs.entropy, *outputs.heads):
        assert found.dtype == torch.float32
    assert {value.dtype for value in moved(adapter).values()} == {torch.float32}
    assert adapter.last.updates > 0
    alone = -(outputs.logits.detach().double().softmax(1) * outputs.logits.detach().double().log_softmax(1)).sum(1)
    torch.testing.assert_close(outputs.entropy.detach().double(), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["tent", "sar", "poem", "roid"])
@pytest.mark.parametrize("kind", NETS)
def test_a_copied_adapter_runs_its_own_copy_of_the_model(kind: str, method: str) -> None:
    """Nothing of the copy reaches back to the original, and the other way round."""
    first, second, third = stream()
    adapter = adapted(kind, method, lr=LR[kind] / 10)
    expected = adapted(kind, method, lr=LR[kind] / 10)
    adapter(first), expected(first)
    twin = copy.deepcopy(adapter)
    assert twin.model is not adapter.model
    before = tensors(adapter)
    twin(third)
    assert twin.last.updates > 0
    assert_same(tensors(adapter), before)
    assert torch.equal(adapter(second), expected(second))
    again = copy.deepcopy(expected)
    with torch.no_grad():
        for parameter in expected.model.parameters():
            parameter.zero_()
    assert torch.equal(again(third), adapter(third))


@pytest.mark.parametrize("method", ["tent", "lame", "poem"])
def test_between_calls_the_model_carries_no_hook_and_can_be_copied(method: str) -> None:
    model = net("bn")
    adapter = poem.adapt(model, method)
    (batch, *_) = stream()
    adapter(batch)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
    other = copy.deepcopy(model)
    assert torch.equal(other(batch), model(batch))


def test_frozen_inside_frozen_stays_frozen() -> None:
    adapter = poem.adapt(make_net("bn"), "tent", lr=0.5)
    x = torch.rand(4, 3, 16, 16)
    with adapter.frozen():
        first = adapter(x)
        with adapter.frozen():
            adapter(x)
        assert torch.equal(adapter(x), first)
    assert adapter.totals.batches == 0
    adapter(x)
    assert adapter.totals.updates == 1


@pytest.mark.parametrize("method", ["tent", "poem"])
def test_autocast_by_the_caller_reaches_the_network_and_nothing_else(method: str) -> None:
    adapter, plain = learner(method=method), learner(method=method)
    seen: list[torch.dtype] = []
    adapter.model.conv1.register_forward_hook(lambda _, __, out: seen.append(out.dtype))  # type: ignore[union-attr]
    for seed in (1, 2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer = adapter(batch(seed=seed))
            assert torch.is_autocast_enabled("cpu")
        assert answer.dtype == adapter.last.first_entropy.dtype == torch.float32
        torch.testing.assert_close(answer.softmax(1), plain(batch(seed=seed)).softmax(1), atol=0.15, rtol=0)
    assert set(seen) == {torch.bfloat16}
    assert adapter.totals.updates > 0
    assert {tensor.dtype for name, tensor in moving(adapter).items()} == {torch.float32}


def moving(adapter: poem.Adapter) -> dict[str, Tensor]:
    return {name: t for name, t in adapter.state_dict()["tensors"].items() if name.startswith("moved/")}


@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
@pytest.mark.parametrize("method", ["tent", "poem"])
def test_a_bfloat16_model_keeps_what_moves_in_single_precision(method: str, kind: str) -> None:
    adapter = learner(kind, method, sharp(kind).bfloat16(), lr=1e-5, **({"threshold": 0.6} if method == "poem" else {}))
    before = moving(adapter)
    for seed in (1, 2):
        answer = adapter(batch(seed=seed))
        assert answer.dtype == adapter.last.first_entropy.dtype == torch.float32
        assert bool(answer.isfinite().all())
    assert adapter.totals.updates > 0
    after = moving(adapter)
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    # Steps too small for bfloat16 to hold have been kept.
    changed = [name for name in after if not torch.equal(after[name], before[name])]
    assert changed
    assert any(torch.equal(after[name].bfloat16(), before[name].bfloat16()) for name in changed)
    assert {parameter.dtype for parameter in adapter.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("method", ["source", "tent", "poem"])
def test_a_model_put_in_training_mode_is_still_read_in_eval_mode(method: str) -> None:
    adapter, plain = learner(method=method), learner(method=method)
    adapter.model.train()
    buffers = {name: buffer.clone() for name, buffer in adapter.model.named_buffers()}
    for seed in (1, 2):
        assert torch.equal(adapter(batch(seed=seed)), plain(batch(seed=seed)))
    assert (adapter.totals.taught > 0) == (method != "source")
    assert all(module.training for module in adapter.model.modules())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in adapter.model.named_buffers())


@pytest.mark.parametrize(
    ("method", "changes"),
    [("tent", {}), ("eta", LOOSE), ("poem", {}), ("roid", {**UNIT, "lr": 0.002}), ("cotta", UNIT)],
    ids=["tent", "eta", "poem", "roid", "cotta"],
)
def test_frozen_predicts_with_the_adapted_weights_and_changes_no_state(method: str, changes: dict[str, Any]) -> None:
    adapter, untaught = (learner("gn", method, **changes) for _ in range(2))
    adapter(batch())
    before, last = snapshot(adapter), adapter.last
    assert adapter.totals.updates > 0
    with adapter.frozen(), untaught.frozen():
        answer = adapter(batch(seed=2))
        assert torch.equal(adapter(batch(seed=2)), answer)
        assert not torch.allclose(untaught(batch(seed=2)), answer, atol=1e-5)
    assert snapshot(adapter) == before
    assert adapter.last is last


def test_frozen_changes_no_state_before_the_first_batch_either() -> None:
    adapter = learner(method="eta", **LOOSE)
    before = snapshot(adapter)
    with adapter.frozen():
        adapter(batch(3))
    assert snapshot(adapter) == before


def test_an_example_does_not_fix_the_batch_size() -> None:
    plain, tried = (poem.adapt(sharp("gn"), "poem", example=example) for example in (None, batch(1)))
    assert doubles(tried) is True
    for adapter in (plain, tried):
        adapter(batch(8))
        assert adapter.totals.updates > 0
    assert tried.lr == plain.lr


def test_an_adapter_sits_in_a_sequence_without_parameters() -> None:
    adapter, plain = learner(), learner()
    chain = nn.Sequential(nn.Identity(), adapter.as_module(), nn.Softmax(1))
    assert list(chain.parameters()) == []
    assert chain.state_dict() == {}
    chain.train()
    assert not adapter.model.training
    for seed in (1, 2):
        assert torch.equal(chain(batch(seed=seed)), plain(batch(seed=seed)).softmax(1))
    assert adapter.totals.updates == plain.totals.updates > 0


def test_stream_takes_images_or_tuples_that_begin_with_them() -> None:
    batches = [batch(seed=seed) for seed in (1, 2)]
    plain, bare, labelled = learner(), learner(), learner()
    expected = [plain(images) for images in batches]
    labels = torch.zeros(8, dtype=torch.long)
    assert all(torch.equal(a, b) for a, b in zip(expected, bare.stream(batches), strict=True))
    pairs = labelled.stream([(batches[0], labels), [batches[1], labels, "path"]])
    assert all(torch.equal(a, b) for a, b in zip(expected, pairs, strict=True))
    assert snapshot(bare) == snapshot(labelled) == snapshot(plain)
    assert plain.totals.taught > 0
    assert list(bare.stream([])) == []
