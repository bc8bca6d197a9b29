"""An exported network answers as the frozen adapter, and is a plain module."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same_answers
from learners import RICH, UNIT, batch, begun, learner, sharp
from nets import Wrapped, make_net
from torch import Tensor, nn
from toys import images

import poem
from poem.parts import Blended, Components, EntropyBelow, Mixed, RunningMean, Significant, Source
from poem.zoo.imagenet_nets import ImageNetViT
from poem.zoo.nets import build


def test_an_export_with_a_branch_copes_with_a_network_that_writes_into_its_input() -> None:
    class Writing(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(0.5).mul_(2.0))

    adapter = poem.adapt(Writing("bn"), "poem", **RICH)
    adapter(images(8, 0))
    given = images(8, 1)
    with adapter.frozen():
        torch.testing.assert_close(adapter.export()(given), adapter(images(8, 1)))
    assert_same_answers([given], [images(8, 1)])


@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("tent", {}),
        ("tent", {"statistics": Source()}),
        ("tent-filtered", {"classes": [3, 1, 8], "threshold": 0.8, "mean": (0.1,) * 3, "std": (0.9,) * 3}),
        ("poem", {}),
        ("poem", {"alpha": 0.3, "classes": [3, 1, 8], "threshold": 0.8}),
        ("poem-official-v2", {"select": EntropyBelow(0.5)}),
        ("cotta", UNIT),
        ("roid", {**UNIT, "lr": 0.001}),
    ],
    ids=["tent", "source statistics", "mask", "poem", "poem mask", "official", "cotta", "roid"],
)
def test_an_export_answers_as_the_frozen_adapter(kind: str, method: str, changes: dict[str, Any]) -> None:
    adapter = learner(kind, method, **changes)
    for seed in (1, 2):
        adapter(batch(seed=seed))
    assert adapter.totals.updates > 0
    plain = adapter.export()
    with adapter.frozen(), torch.no_grad():
        torch.testing.assert_close(plain(batch(seed=3)), adapter(batch(seed=3)), atol=1e-4, rtol=1e-4)
        before = plain(batch(seed=3))
        adapter.reset()  # the export keeps what it was given
        assert torch.equal(plain(batch(seed=3)), before)
        assert not torch.allclose(adapter(batch(seed=3)), before, atol=1e-6)
    assert type(plain.heads[0]) is type(adapter.model)  # type: ignore[index]
    assert not plain.training


def test_what_depends_on_each_batch_is_not_exported() -> None:
    adapter = poem.adapt(sharp(), "memo", **UNIT)
    with pytest.raises(
        ValueError, match=r"Mixed\(.*depends on each batch and cannot be exported; use statistics=Source"
    ):
        adapter.export()


exports = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8),
    reason="torch.export of torch 2.6 and 2.7 fails on these",
)


@exports
def test_an_export_goes_through_torch_export() -> None:
    adapter = begun("poem", "gn")
    plain = adapter.export()
    program = torch.export.export(plain, (batch(),), strict=False).module()
    torch.testing.assert_close(program(batch(seed=2)), plain(batch(seed=2)))


# The user's own keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
@pytest.mark.parametrize(
    "changes", [{}, {"mean": (0.1,) * 3, "std": (0.9,) * 3, "classes": [3, 1, 8]}], ids=["", "more"]
)
def test_without_a_branch_an_export_has_the_keys_of_the_model_and_loads_into_its_class(
    kind: str, changes: dict[str, Any]
) -> None:
    adapter = begun("tent", kind, lr=0.01, **changes)
    plain, mine = adapter.export(), make_net(kind)
    state = plain.state_dict()
    assert list(state) == list(mine.state_dict()) or set(state) == set(mine.state_dict())
    mine.load_state_dict(state)
    for name, value in adapter._state.named().items():
        assert torch.equal(dict(mine.named_parameters())[name], value)
    untouched = {name: value for name, value in adapter.model.state_dict().items() if name not in adapter.adapted}
    assert all(torch.equal(mine.state_dict()[name], value) for name, value in untouched.items())


def test_an_export_takes_its_own_state_back_alone_and_inside_another_module() -> None:
    plain = begun("tent", "bn").export()
    wanted = plain(batch(seed=4))
    for holder in (copy.deepcopy(plain), nn.Sequential(copy.deepcopy(plain), nn.Identity())):
        state = {key: value.clone() for key, value in holder.state_dict().items()}
        with torch.no_grad():
            for parameter in holder.parameters():
                parameter.zero_()
        assert not torch.allclose(holder(batch(seed=4)), wanted)
        holder.load_state_dict(state)
        assert torch.equal(holder(batch(seed=4)), wanted)
        with pytest.raises(RuntimeError, match="Unexpected key"):
            holder.load_state_dict({**state, f"{'0.' if isinstance(holder, nn.Sequential) else ''}strange": wanted})
    assert torch.equal(pickle.loads(pickle.dumps(plain))(batch(seed=4)), wanted)


def test_with_a_branch_an_export_says_that_it_holds_two_networks(caplog: pytest.LogCaptureFixture) -> None:
    adapter = begun("poem", "gn")
    with caplog.at_level(logging.WARNING, "poem"):
        plain = adapter.export()
    assert "two networks, with keys heads.0. and heads.1." in caplog.text
    assert {key.split(".")[1] for key in plain.state_dict()} == {"0", "1"}
    caplog.clear()
    begun("tent", "gn").export()
    assert not caplog.records


def test_a_correction_that_remembers_is_exported_as_it_stands() -> None:
    adapter = learner("gn", "auto", preset="cifar")
    for seed in (1, 2, 3):
        adapter(batch(seed=seed))
    with adapter.frozen(), torch.no_grad():
        torch.testing.assert_close(adapter.export()(batch(seed=4)), adapter(batch(seed=4)), atol=1e-4, rtol=1e-4)


# Frozen statistics ---------------------------------------------------------------------------------------------------


def one_by_one(plain: nn.Module, shown: Tensor) -> Tensor:
    return torch.cat([plain(each[None]) for each in shown])


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "tent"},
        {"method": "tent", "statistics": RunningMean(0.2)},
        {"method": "tent", "statistics": Mixed(0.3)},
        {"method": "tent", "statistics": Significant()},
        {"method": "tent", "statistics": Components()},
        {"method": "poem"},
        {"method": "auto"},
        {"method": "memo", **UNIT},
        {"method": "rotta", **UNIT},
        {"method": "roid", "lr": 0.001, **UNIT},
        {"method": "lame"},
    ],
    ids=lambda changes: f"{changes['method']} {changes.get('statistics', '')}",
)
def test_with_frozen_statistics_an_answer_depends_on_no_other_sample(changes: dict[str, Any]) -> None:
    adapter = learner("bn", **changes)
    for seed in (1, 2, 3):
        adapter(batch(16, seed=seed))
    plain = adapter.export(statistics="frozen")
    with torch.no_grad():
        torch.testing.assert_close(one_by_one(plain, batch(16, seed=3)), plain(batch(16, seed=3)), atol=1e-4, rtol=1e-4)
    if len(plain.heads) == 1:  # type: ignore[arg-type]
        mine = make_net("bn")
        mine.load_state_dict(plain.state_dict())
        head: Any = plain.heads[0]  # type: ignore[index]
        torch.testing.assert_close(mine.eval()(batch(seed=4)), head(batch(seed=4)))


@pytest.mark.parametrize("method", ["tent", "poem"])
def test_frozen_statistics_are_those_of_the_last_batch_where_none_are_remembered(method: str) -> None:
    adapter = learner("bn", method, **RICH) if method == "poem" else learner("bn", method)
    for seed in (1, 2):
        adapter(batch(16, seed=seed))
    before = adapter.state_dict()["tensors"]
    plain = adapter.export(statistics="frozen")
    with adapter.frozen(), torch.no_grad():
        torch.testing.assert_close(plain(batch(16, seed=2)), adapter(batch(16, seed=2)), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(plain(batch(16, seed=5)), adapter(batch(16, seed=5)), atol=1e-2)
    assert all(torch.equal(value, before[name]) for name, value in adapter.state_dict()["tensors"].items())


def test_frozen_statistics_of_several_batches_are_those_of_all_samples_together() -> None:
    adapter = learner("bn", "bn")
    adapter(batch(seed=1))
    shown = [batch(8, seed=2), batch(4, seed=3)]
    plain = adapter.export(statistics="frozen", stream=[(each, torch.zeros(len(each))) for each in shown])
    head: Any = plain.heads[0]  # type: ignore[index]
    first = next(name for name, each in head.named_modules() if isinstance(each, nn.BatchNorm2d))
    reached: list[Tensor] = []
    adapter.model.get_submodule(first).register_forward_pre_hook(lambda _, args: reached.append(args[0].detach()))
    adapter.model(torch.cat(shown))
    flat = reached[0].transpose(0, 1).flatten(1)
    layer = head.get_submodule(first)
    torch.testing.assert_close(layer.running_mean, flat.mean(1))
    torch.testing.assert_close(layer.running_var, flat.var(1, correction=0))


def test_blended_copies_become_the_one_that_counts_most() -> None:
    """Beside each copy alone: the frozen export is one of them, and not the one that follows the batch."""
    adapter = learner("bn", "auto", preset="cifar")
    for seed in range(1, 6):
        adapter(batch(16, seed=seed))
    part = adapter.recipe.statistics
    assert isinstance(part, Blended)
    memory, norms = adapter._state.memory, [norm for norm in adapter._network.norms if norm.batch]
    place = part.frozen_copy(memory)
    assert place != part._closest
    alone: Any = adapter.export(statistics="frozen").heads[0]  # type: ignore[index]
    for norm in norms:
        mean, var = part.frozen(norm, memory, norm.key) or (None, None)
        torch.testing.assert_close(alone.get_submodule(norm.name).running_mean, mean)
        torch.testing.assert_close(alone.get_submodule(norm.name).running_var, var)
    for favoured in range(part.copies):
        told = {**memory, "statistics.entropy": torch.full((part.copies,), 2.0)}
        told["statistics.entropy"][favoured] = 0.0
        told["statistics.near"], told["statistics.far"] = torch.ones(2), torch.ones(2)
        told["statistics.predicted"] = torch.full_like(memory["statistics.predicted"], 0.1)
        lasting = part.weights[favoured] == 0 or part.rates[favoured] < 1
        assert part.frozen_copy(told) == favoured if lasting else part.frozen_copy(told) in (0, part._slowest)
    source = part.frozen(norms[0], {**told, "statistics.seen": torch.tensor(0.0)}, norms[0].key)
    assert source is not None
    torch.testing.assert_close(source[0], norms[0].source_mean)


def test_frozen_statistics_leave_a_correction_by_other_samples_out(caplog: pytest.LogCaptureFixture) -> None:
    adapter = begun("roid", "gn", lr=0.001, **UNIT)
    with caplog.at_level(logging.WARNING, "poem"):
        adapter.export(statistics="frozen")
    assert "depends on other samples; the export with frozen statistics leaves it out" in caplog.text


def test_bad_asks_for_frozen_statistics_say_what_to_type() -> None:
    fresh = learner("bn")
    with pytest.raises(ValueError, match=r"remembers none; pass some of the stream: .*stream=images\)"):
        fresh.export(statistics="frozen")
    assert fresh.export(statistics="frozen", stream=batch(seed=1)) is not None
    with pytest.raises(ValueError, match="expected statistics 'recipe' or 'frozen', got 'source'"):
        fresh.export(statistics="source")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected no stream=, because statistics='recipe' measures nothing"):
        fresh.export(stream=batch())
    with pytest.raises(ValueError, match=r"expected no stream=, because nothing has to be measured"):
        learner("gn").export(statistics="frozen", stream=batch())
    with pytest.raises(ValueError, match="finite images"):
        fresh.export(statistics="frozen", stream=batch() * torch.nan)
    shown = batch(seed=1)
    fresh(shown)
    shown.mul_(2)
    with pytest.raises(ValueError, match="last batch was written to since it was answered; pass stream="):
        fresh.export(statistics="frozen")
    fresh.reset()
    with pytest.raises(ValueError, match="remembers none"):
        fresh.export(statistics="frozen")
    never = sharp("bn")
    for layer in never.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean = layer.running_var = None
    bare = poem.adapt(never, "tent")
    bare(batch())
    with pytest.raises(ValueError, match="has no running averages to write into"):
        bare.export(statistics="frozen")


# torch.export and ONNX -----------------------------------------------------------------------------------------------

ANY_SIZE = {"images": {0: torch.export.Dim("batch")}}
ANY_X = {"x": ANY_SIZE["images"]}
TAKEN_HOME = [("bn", "tent", "frozen"), ("bn", "poem", "frozen"), ("bn", "tent", "recipe"), ("gn", "poem", "recipe"),
              ("gn", "tent", "recipe"), ("bn", "auto", "frozen")]  # fmt: skip


def taken_home(kind: str, method: str, statistics: Any) -> nn.Module:
    changes = RICH if method == "poem" else {}
    adapter = learner(kind, method, **{**changes, "mean": (0.1,) * 3, "std": (0.9,) * 3, "classes": [3, 1, 8]})
    for seed in (1, 2):
        adapter(batch(16, seed=seed))
    return adapter.export(statistics=statistics)


@exports
@pytest.mark.parametrize(("kind", "method", "statistics"), TAKEN_HOME)
def test_torch_export_takes_a_batch_of_any_size(kind: str, method: str, statistics: str) -> None:
    plain = taken_home(kind, method, statistics)
    program = torch.export.export(plain, (batch(16),), dynamic_shapes=ANY_SIZE, strict=False).module()
    for count in (3, 16, 20):
        torch.testing.assert_close(program(batch(count, seed=4)), plain(batch(count, seed=4)), atol=1e-4, rtol=1e-4)


@exports
@pytest.mark.parametrize(
    ("kind", "method", "statistics"),
    [case if case[1] == "poem" else pytest.param(*case, marks=pytest.mark.slow) for case in TAKEN_HOME],
)
def test_onnxruntime_answers_as_the_export(kind: str, method: str, statistics: str, tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    onnxruntime = pytest.importorskip("onnxruntime")
    plain, path = taken_home(kind, method, statistics), tmp_path / "adapted.onnx"
    torch.onnx.export(
        plain, (batch(16),), path, dynamic_shapes=ANY_SIZE, input_names=["images"], output_names=["logits"],
        dynamo=True, verbose=False,
    )  # fmt: skip
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for count in (1, 16, 20) if statistics == "frozen" or kind != "bn" else (3, 16, 20):
        shown = batch(count, seed=4)
        found = torch.from_numpy(session.run(None, {"images": shown.numpy()})[0])
        with torch.no_grad():
            torch.testing.assert_close(found, plain(shown), atol=1e-3, rtol=1e-3)


class Several(nn.Module):
    """A model with heads of its own, whose names begin as those of an export's networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(8, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x).mean((2, 3))
        return torch.stack([head(features) for head in self.heads]).mean(0)


@pytest.mark.parametrize("form", ["own", "inner"])
def test_a_state_loads_back_where_the_model_has_heads_of_its_own(form: str) -> None:
    x = torch.rand(4, 3, 16, 16)
    modules = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        modules.append(poem.adapt(Several().eval(), "tent").export(statistics="frozen", stream=x))
    state = modules[0].state_dict()
    if form == "inner":
        state = {f"heads.0.{name}": value for name, value in state.items()}
    modules[1].load_state_dict(state)
    assert torch.equal(modules[1](x), modules[0](x))


@exports
@pytest.mark.parametrize("name", ["digits-ln", "cifar10-vit"])
def test_our_transformers_export_with_a_batch_of_any_size(name: str) -> None:
    plain, size = build(name).eval(), 32
    shown = torch.rand(20, 3, size, size)
    program = torch.export.export(plain, (shown[:4],), dynamic_shapes=ANY_X, strict=False).module()
    for count in (1, 3, 20):
        torch.testing.assert_close(program(shown[:count]), plain(shown[:count]), atol=1e-4, rtol=1e-4)


@exports
def test_our_imagenet_transformer_exports_with_a_batch_of_any_size() -> None:
    plain = ImageNetViT(width=24, depth=2, heads=3, size=32, patch=16, classes=5).eval()
    shown = torch.rand(20, 3, 32, 32)
    program = torch.export.export(plain, (shown[:4],), dynamic_shapes=ANY_X, strict=False).module()
    torch.testing.assert_close(program(shown), plain(shown), atol=1e-4, rtol=1e-4)
