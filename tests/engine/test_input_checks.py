"""Unusual input: what is refused says what was expected, what came and what to type; what is accepted works."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toys
from nets import make_net
from torch import Tensor, nn

import poem
from poem.engine import input_checks as checks
from poem.engine.model_lock import model_lock
from poem.parts import EntropyBelow, Everything, FromBatch, NotRedundant, RunningMean, Source

UNIT: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
SHARPNESS = {"bn": 10.0, "gn": 6.0, "ln": 9.0}
LR = {"bn": 0.05, "gn": 0.02, "ln": 0.002}
LOOSE: dict[str, Any] = {"select": EntropyBelow(0.4) & NotRedundant(0.999)}


def sharp(kind: str = "bn") -> nn.Module:
    """A random net that is sure of some images and unsure of others."""
    return make_net(kind, sharpness=SHARPNESS[kind])


def learner(kind: str = "bn", method: str = "tent", net: nn.Module | None = None, **changes: Any) -> poem.Adapter:
    """An adapter whose updates show."""
    return poem.adapt(sharp(kind) if net is None else net, method, **{"lr": LR[kind], **changes})


def batch(count: int = 8, seed: int = 1) -> Tensor:
    return toys.images(count, seed=seed)


def snapshot(adapter: poem.Adapter) -> tuple[Any, ...]:
    """State and counts, to compare bit for bit."""
    state = adapter.state_dict()
    tensors = {name: tensor.tolist() for name, tensor in state.pop("tensors").items()}
    return {**state, "rng": state["rng"].tolist()}, tensors, adapter.totals


def refuses(adapter: poem.Adapter, images: Any, kind: type[Exception], words: str) -> None:
    """The call raises, in these words, and leaves no trace; then the adapter goes on learning."""
    before = snapshot(adapter)
    with pytest.raises(kind, match=words):
        adapter(images)
    assert snapshot(adapter) == before
    taught = adapter.totals.taught
    adapter(batch())
    assert adapter.totals.taught > taught


# Images --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
def test_broken_pixels_are_named_by_sample(kind: str, bad: float) -> None:
    adapter, broken = learner(kind), batch()
    adapter(batch())
    broken[2, 0, 0, 0] = broken[5, 1, 3, 3] = bad
    refuses(adapter, broken, ValueError, r"finite images, got NaN or Inf in sample 2 \(2 samples: 2, 5\)")


def test_broken_pixels_are_refused_when_frozen_too() -> None:
    adapter, broken = learner(), batch()
    broken[3] = torch.nan
    with adapter.frozen(), pytest.raises(ValueError, match="sample 3"):
        adapter(broken)


@pytest.mark.parametrize(
    ("images", "kind", "words"),
    [
        (batch()[:0], ValueError, r"at least one image, got shape \(0, 3, 16, 16\)"),
        (batch()[0], ValueError, r"\(batch, 3, height, width\), got \(3, 16, 16\)"),
        (batch()[None], ValueError, r"\(batch, 3, height, width\), got \(1, 8, 3, 16, 16\)"),
        (batch()[:, :1], ValueError, r"expected 3 channels, got 1 in shape \(8, 1, 16, 16\)"),
        (
            (batch() * 255).byte(),
            ValueError,
            r"floating-point images, got torch.uint8; divide by 255: x.float\(\) / 255",
        ),
        (batch().long(), ValueError, "floating-point images, got torch.int64; divide by 255"),
        (batch().numpy(), TypeError, "expected a tensor of images, got ndarray"),
        ([batch()], TypeError, r"got list; adapter.stream\(loader\) takes loaders"),
        (batch().to("meta"), ValueError, r"images on cpu, where the model is, got meta; use images.to\(...\)"),
    ],
    ids=["empty", "one image", "rank 5", "channels", "uint8", "int64", "numpy", "list", "device"],
)
def test_what_is_not_a_batch_of_images_is_refused(images: Any, kind: type[Exception], words: str) -> None:
    refuses(learner(), images, kind, words)


def test_another_number_of_classes_is_refused() -> None:
    shown = {"classes": 10}
    adapter = learner("gn", logits=lambda out: out[:, : shown["classes"]])
    adapter(batch())
    before = snapshot(adapter)
    shown["classes"] = 6
    with pytest.raises(ValueError, match=r"expected 10 classes as before, got 6; call adapter.reset\(\)"):
        adapter(batch())
    assert snapshot(adapter) == before
    adapter.reset()
    assert adapter(batch()).shape == (8, 6)


class OnePixel(nn.Module):
    """Batch norm on maps, then on a single pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x))).mean((2, 3), keepdim=True)
        logits: Tensor = self.head(self.norm2(self.conv2(x)).flatten(1))
        return logits


def one_pixel() -> OnePixel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = OnePixel().eval()
        nn.init.uniform_(net.norm2.running_mean, -0.3, 0.3)  # type: ignore[arg-type]
        nn.init.uniform_(net.norm2.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    return net


def test_one_image_on_a_single_pixel_falls_back_to_source_statistics() -> None:
    net, image = one_pixel(), batch(1)
    expected = copy.deepcopy(net)
    expected.norm1.train()
    adapter = learner(net=net)
    torch.testing.assert_close(adapter(image), expected(image).detach())
    assert adapter.totals.updates == 1
    assert "falls back to" in " ".join((FromBatch.__doc__ or "").split())


def test_a_masked_pass_that_keeps_one_image_equals_the_pass_over_it() -> None:
    images, kept = batch(4), torch.tensor([False, True, False, False])
    network = learner(net=one_pixel())._network
    with torch.no_grad(), network.borrowed("cpu"):
        (masked,), _ = network.heads(images, None, None, FromBatch(), {}, kept)
        (alone,), _ = network.heads(images[kept], None, None, FromBatch(), {})
    torch.testing.assert_close(masked[kept], alone)


# Models --------------------------------------------------------------------------------------------------------------


def test_a_model_with_nothing_to_adapt_says_what_to_try() -> None:
    bare = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    with pytest.raises(ValueError, match=r"matched no parameter of Sequential; try parameters=Everything\(\)"):
        poem.adapt(bare, "tent")
    remedy = r"poem\.adapt\(model, 'tent', parameters=Everything\(\)\), or one that learns nothing: 'source', 'lame'"
    with pytest.raises(ValueError, match=rf"norm layers on both sides of a split, found 0.*{remedy}") as error:
        poem.adapt(bare, "poem")
    assert "split=" not in str(error.value), "no split can help"
    with pytest.raises(ValueError, match=rf"Sequential has no norm layer for the adapt branch; .*{remedy}"):
        poem.adapt(bare, "poem", split="1", parameters=Everything())
    for method in ("source", "lame"):
        assert poem.adapt(bare, method)(batch()).shape == (8, 10)
    adapter = poem.adapt(bare, "tent", parameters=Everything(), lr=0.01)
    adapter(batch())
    assert adapter.totals.updates == 1


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("presicion", "Did you mean precision?"),
        ("Fast", "Did you mean fast?"),
        ("batchsize", "Did you mean batch_size?"),
        ("device", "move the model, model.to"),
        ("threshhold", "Did you mean threshold?"),
    ],
)
def test_a_misspelt_argument_is_told_the_nearest(word: str, said: str) -> None:
    changes: dict[str, Any] = {word: 1}
    with pytest.raises(TypeError, match=re.escape(said)):
        poem.adapt(make_net("bn"), "tent", **changes)


def test_half_precision_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 or bfloat16 on the CPU, got float16 in .*; call model.float\(\)"):
        poem.adapt(sharp().half(), "tent")


def test_wrappers_are_refused_with_the_way_round() -> None:
    with pytest.raises(TypeError, match=r"expected a plain module, got DataParallel; adapt model\.module"):
        poem.adapt(nn.DataParallel(sharp()), "tent")
    scripted = torch.jit.trace(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()).eval(), batch())
    with pytest.raises(TypeError, match="got a ScriptModule; adapt the module it came from"):
        poem.adapt(scripted, "tent")
    with pytest.raises(TypeError, match=r"expected an nn\.Module from images to logits, got function"):
        poem.adapt(lambda x: x, "tent")  # type: ignore[arg-type]


def test_a_model_made_under_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        net = sharp()
    with pytest.raises(ValueError, match="made under inference_mode and cannot learn; build the model outside it"):
        poem.adapt(net, "tent")


class Wrapped(nn.Module):
    """A net whose output is put into something."""

    def __init__(self, net: nn.Module, put: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.put = net, put

    def forward(self, x: Tensor) -> Any:
        return self.put(self.net(x))


@pytest.mark.parametrize(
    "put", [lambda out: {"logits": out, "loss": None}, lambda out: SimpleNamespace(logits=out)], ids=["dict", ".logits"]
)
@pytest.mark.parametrize("method", ["tent", "poem"])
def test_logits_inside_an_output_are_found(method: str, put: Callable[[Tensor], Any]) -> None:
    adapter, plain = learner(method=method, net=Wrapped(sharp(), put)), learner(method=method)
    for seed in (1, 2):
        assert torch.equal(adapter(batch(seed=seed)), plain(batch(seed=seed)))
    assert adapter.totals.taught > 0


def test_a_tuple_needs_to_be_told_where_the_logits_are() -> None:
    net = Wrapped(sharp(), lambda out: (out, None))
    with pytest.raises(TypeError, match=r"a tensor, .logits or \['logits'\]\), got tuple; pass logits=lambda out"):
        learner(net=net)(batch())
    adapter = learner(net=net, logits=lambda out: out[0])
    assert torch.equal(adapter(batch()), learner()(batch()))
    assert adapter.totals.taught > 0


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(batch, classes\), got \(8, 10, 1\); pass logits="):
        learner(net=Wrapped(sharp(), lambda out: out[..., None]))(batch())


# Names and settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"), [("tnet", "tent"), ("poem-offical", "poem-official"), ("sar+peom", r"sar\+poem")]
)
def test_an_unknown_method_gets_the_nearest_names(name: str, near: str) -> None:
    with pytest.raises(
        ValueError, match=rf"unknown method '{name.replace('+', '[+]')}'. Did you mean .*{near}.*Methods: source"
    ):
        poem.adapt(sharp(), name)


@pytest.mark.parametrize("method", ["tent", "eata", "cotta", "memo", "poem"])
def test_cifar10_is_another_name_of_the_cifar_preset(method: str) -> None:
    assert poem.recipe(method, "cifar10") == poem.recipe(method, "cifar") != poem.recipe(method)
    assert poem.adapt(sharp(), "tent", preset="cifar10").recipe == poem.recipe("tent", "cifar")


@pytest.mark.parametrize(("name", "near"), [("selct", "select"), ("treshold", "threshold"), ("learning_rate", "")])
def test_an_unknown_field_gets_the_nearest_and_the_list(name: str, near: str) -> None:
    changes: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=rf"no field '{name}'.*{near}.*Fields: parameters.*aliases: threshold"):
        poem.adapt(sharp(), "tent", **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"select": EntropyBelow}, "expected select to be a Select, got <class"),
        ({"select": 0.4}, "expected select to be a Select, got 0.4"),
        ({"step": "adam"}, "expected step to be a Step, got 'adam'"),
        ({"lr": "fast"}, "expected lr to be a number of at least 0 or a Rule, got 'fast'"),
        ({"branch": True}, "expected branch to be an AdaptBranch or None, got True"),
        ({"views": 4}, "expected views to be a .*, got 4"),
    ],
    ids=["class", "number", "step", "lr", "branch", "views"],
)
def test_a_field_of_the_wrong_kind_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        poem.adapt(sharp(), "poem", **changes)


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("tent", {"threshold": 0.4}, "needs an EntropyBelow in the selection"),
        (
            "poem-official-v2",
            {"threshold": 0.6},
            r"one fraction, and EntropyBelow\(0.4, first=0.5\) has two; .*select=EntropyBelow\(0.6, first=0.6\)",
        ),
        ("tent", {"alpha": 0.5}, "a setting of the adapt branch, which this recipe has not"),
        ("poem", {"alpha": 1.5}, "expected alpha to be a number from 0 to 1, got 1.5; it is the source's share"),
        ("poem", {"rounds": 0}, "expected updates to be an integer of at least 1, got 0; use the method 'source'"),
        ("poem", {"depth": 9}, r"expected depth 1..4 for a network of 4 stages, got 9; or pass split="),
        ("poem", {"split": "layer9"}, "expected the name of a module, got 'layer9'; nearest: 'layer"),
        (
            "poem",
            {"readout": "middle"},
            "expected look to be 'first', 'before-last', 'last' or 'teacher', got 'middle'",
        ),
        ("tent", {"readout": "teacher"}, r"needs a teacher; add teacher=MeanTeacher\(\)"),
        ("tent", {"preset": "mnist"}, "expected preset imagenet, cifar or cifar100, got 'mnist'"),
        ("tent", {"precision": "fp8"}, "expected precision fp32, tf32 or bf16, got 'fp8'"),
        ("tent", {"fast": "yes"}, "expected fast 'auto', True or False, got 'yes'"),
        ("tent", {"fast": 1}, "expected fast 'auto', True or False, got 1"),
        ("tent", {"compile": "no"}, "expected compile True or False, got 'no'"),
        ("tent", {"mean": (0.5, 0.5, 0.5)}, "expected mean and std together, got one of them; pass both, or neither"),
        ("tent", {"std": (0.5, 0.5, 0.5)}, "expected mean and std together"),
        ("roid", {}, r"roid augments images in \[0, 1\].*mean=\(0, 0, 0\), std=\(1, 1, 1\)"),
        ("memo", {}, r"memo augments images in \[0, 1\].*mean=\(0, 0, 0\), std=\(1, 1, 1\)"),
        ("cotta+poem", {}, r"cotta\+poem augments images in \[0, 1\].*mean=\(0, 0, 0\), std=\(1, 1, 1\)"),
    ],
    ids=[
        "threshold",
        "two thresholds",
        "no branch",
        "alpha",
        "rounds",
        "depth",
        "split",
        "readout",
        "no teacher",
        "preset",
        "precision",
        "fast",
        "fast 1",
        "compile",
        "mean alone",
        "std alone",
        "roid bare",
        "memo bare",
        "cotta bare",
    ],
)
def test_settings_that_contradict_are_refused(method: str, changes: dict[str, Any], words: str) -> None:
    net = sharp()
    with pytest.raises(ValueError, match=words):
        poem.adapt(net, method, **changes)
    assert poem.adapt(net, "tent").unload() is net


def test_compile_on_cuda_is_refused_by_adapt_and_by_a_call_after_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    net = sharp()
    moved = learner(net=net, compile=True)
    assert not any(map(checks.on_cuda, (net, batch())))
    monkeypatch.setattr(checks, "on_cuda", lambda _: True)
    words = r"compile=True is not available on CUDA in this version; use precision='bf16' with fast='auto' or fast=True"
    borrowers = model_lock(net).adapters
    with pytest.raises(ValueError, match=words):
        poem.adapt(net, "tent", compile=True)
    assert model_lock(net).adapters == borrowers
    before = snapshot(moved)
    with pytest.raises(ValueError, match=words):
        moved(batch())
    assert snapshot(moved) == before
    plain = learner(net=net)
    plain(batch())
    assert plain.totals.taught > 0


def test_a_class_mask_moves_the_threshold_to_its_own_logarithm() -> None:
    classes, net = [7, 1, 4], sharp()
    adapter = learner(method="tent-filtered", net=net, classes=classes, threshold=0.6)
    whole = poem.adapt(net, "bn")(batch(16))
    assert torch.equal(adapter(batch(16)), whole[:, classes])
    log_p = whole[:, classes].log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    below = entropy < 0.6 * math.log(3)
    assert 0 < int(below.sum()) < 16
    assert not torch.equal(below, entropy < 0.6 * math.log(10))
    assert torch.equal(adapter.last.selected, below)
    assert adapter.totals.taught == int(below.sum())


def test_source_data_may_be_one_tensor_and_serve_two_adapters() -> None:
    data = batch(16, seed=3)
    adapters = [learner(method="eata", source_data=data, **LOOSE) for _ in range(2)]
    assert [adapter.preparation["forwards"] for adapter in adapters] == [16, 16]
    one, other = (adapter(batch()) for adapter in adapters)
    assert torch.equal(one, other)


def test_eata_without_source_data_says_that_it_runs_as_eta(caplog: pytest.LogCaptureFixture) -> None:
    learner(method="eata", **LOOSE)
    assert "eata has no source_data for its Fisher anchor and runs as ETA" in caplog.text


# A network that breaks under way -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("tent", {}, "the update was not finite"),
        ("tent*", {}, "the update was not finite"),
        ("cotta", UNIT, "the update was not finite"),
        ("eta", LOOSE, "nothing selected"),
        ("sar", {"threshold": 0.6}, "nothing selected"),
        ("poem", {}, "nothing selected"),
        ("roid", UNIT, "nothing selected"),
    ],
    ids=["tent", "tent*", "cotta", "eta", "sar", "poem", "roid"],
)
@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
def test_a_loss_that_is_not_finite_is_skipped(kind: str, method: str, changes: dict[str, Any], reason: str) -> None:
    """The images are sound but the network is not, for one batch: said in `last.skipped`, and nothing moves."""
    net, broken = sharp(kind), {"now": False}
    net.register_forward_hook(lambda _, __, out: out * torch.nan if broken["now"] else out)
    adapter = learner(kind, method, net, **changes)
    adapter(batch())
    assert adapter.totals.updates > 0
    before = snapshot(adapter)[1]
    broken["now"] = True
    adapter(batch(seed=2))
    assert str(adapter.last.skipped).startswith(reason)
    assert adapter.totals.skips == 1
    assert snapshot(adapter)[1] == before
    broken["now"] = False
    assert bool(adapter(batch(seed=3)).isfinite().all())
    assert adapter.last.updates > 0


def test_one_overflowing_image_leaves_running_statistics_alone() -> None:
    adapter = learner(method="tent-filtered", statistics=RunningMean(0.1))
    adapter(batch())
    before = snapshot(adapter)[1]
    adapter(batch(seed=2) * 3e38)  # finite, but its activations are not
    assert adapter.last.skipped is not None
    assert snapshot(adapter)[1] == before


# States --------------------------------------------------------------------------------------------------------------


def begun(method: str = "eta", kind: str = "bn", **changes: Any) -> poem.Adapter:
    """An adapter that has learnt."""
    adapter = learner(kind, method, **(changes or (LOOSE if method == "eta" else {})))
    adapter(batch())
    assert adapter.totals.taught > 0
    return adapter


def without(key: str) -> Callable[[dict[str, Any]], None]:
    def drop(state: dict[str, Any]) -> None:
        del state["tensors"][key]

    return drop


def with_memory(name: str, tensor: Tensor) -> Callable[[dict[str, Any]], None]:
    def put(state: dict[str, Any]) -> None:
        state["tensors"][f"memory/{name}"] = tensor

    return put


def spoil_shape(state: dict[str, Any]) -> None:
    state["tensors"]["moved/norm1.weight"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda state: state.update(recipe="Recipe()", method="sar"),
            "expected recipe .*; make the adapter with method 'sar'",
        ),
        (lambda state: state.update(schema=99), "expected schema 2, got 99; this version reads only its own"),
        (
            lambda state: state.update(source="another"),
            "expected source .*; load the same weights into the model first",
        ),
        (without("moved/norm1.weight"), r"expected tensors \['moved/norm1.weight'\] in the state, which it lacks"),
        (without("step/theta/velocity"), r"expected tensors \['step/theta/velocity'\] in the state, which it lacks"),
        (without("memory/select.second.mean"), r"expected tensors \['memory/select.second.mean'\] in the state"),
        (lambda state: state.pop("rng"), "rng"),
        (lambda state: state.pop("calls"), "calls"),
        (spoil_shape, r"expected moved/norm1.weight of shape \(8,\) .*, got \(3,\)"),
        (lambda state: state.update(mean=[0.5]), "expected mean None, got .*; pass the same mean="),
        (lambda state: state.update(std=[0.5]), "expected std None, got .*; pass the same std="),
        (lambda state: state.update(mask=[1, 2]), "expected mask None, got .*; pass the same classes="),
        (lambda state: state.update(calls=-1), "expected calls to be an integer of at least 0, got -1"),
        (lambda state: state.update(batch_size="8"), "expected batch_size to be an integer of at least 1, got '8'"),
        (lambda state: state.update(notes=1), r"got \['notes'\] besides"),
        (with_memory("prior.mean", torch.zeros(10)), r"only tensors that .* keeps, got \['memory/select.mean'\]"),
        (with_memory("redundancy.mean", torch.full((10,), torch.nan)), "expected finite numbers in memory/redund"),
        (with_memory("redundancy.mean", torch.zeros(7)), r"expected memory/select.second.mean of shape \(10,\)"),
        (lambda state: state.clear(), r"expected a state from adapter.state_dict\(\)"),
    ],
    ids=["recipe", "schema", "source", "moved", "step", "memory", "rng", "calls", "shape", "mean", "std", "mask",
         "count", "size", "besides", "foreign", "nan", "memory-shape", "empty"],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_refused_whole(spoil: Callable[[dict[str, Any]], None], words: str) -> None:
    giver, taker = begun(), begun()
    taker(batch(seed=4))
    state, before = giver.state_dict(), snapshot(taker)
    assert snapshot(giver)[1] != before[1]
    spoil(state)
    with pytest.raises(ValueError, match=words):
        taker.load_state_dict(state)
    assert snapshot(taker) == before
    taker.load_state_dict(giver.state_dict())
    assert snapshot(taker)[:2] == snapshot(giver)[:2]


def test_states_of_another_method_or_model_are_refused() -> None:
    state = begun().state_dict()
    with pytest.raises(ValueError, match="make the adapter with method 'eta'"):
        begun("tent").load_state_dict(state)
    with pytest.raises(ValueError, match="load the same weights into the model first"):
        learner(method="eta", net=make_net("bn", seed=1), **LOOSE).load_state_dict(state)


def test_a_file_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    adapter, path = begun(), tmp_path / "state"
    adapter.save(path)
    whole = path.read_bytes()
    before = snapshot(adapter)
    for cut in (whole[: len(whole) // 2], whole[:4], b"", b"not a state at all"):
        path.write_bytes(cut)
        with pytest.raises(ValueError, match=r"expected a state written by adapter\.save, got .*state"):
            adapter.load(path)
        assert snapshot(adapter) == before
    with pytest.raises(FileNotFoundError):
        adapter.load(tmp_path / "nowhere")
    path.write_bytes(whole)
    adapter(batch(seed=4))
    adapter.load(path)
    assert snapshot(adapter)[:2] == before[:2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def test_pickling_is_refused_and_names_save() -> None:
    with pytest.raises(TypeError, match=r"adapter.save\(path\)"):
        pickle.dumps(begun())


@pytest.mark.parametrize(
    ("kind", "method", "changes"),
    [
        ("bn", "eta", LOOSE),
        ("bn", "eata", {**LOOSE, "source_data": [batch(seed=3)]}),
        ("gn", "poem", {}),
        ("ln", "roid+poem", {**UNIT, "lr": 0.0002}),
    ],
    ids=["eta", "eata", "poem", "roid+poem"],
)
def test_a_deep_copy_goes_on_alone_on_a_copied_model(kind: str, method: str, changes: dict[str, Any]) -> None:
    adapter = begun(method, kind, **changes)
    twin = copy.deepcopy(adapter)
    assert twin.model is not adapter.model
    assert snapshot(twin)[:2] == snapshot(adapter)[:2]
    before = snapshot(adapter)
    answer = twin(batch(seed=2))
    assert snapshot(adapter) == before
    assert torch.equal(adapter(batch(seed=2)), answer)
    assert snapshot(twin)[:2] == snapshot(adapter)[:2]


def test_an_unloaded_adapter_is_spent() -> None:
    adapter = begun()
    net = adapter.unload()
    for use in (lambda: adapter(batch()), adapter.reset, adapter.unload):
        with pytest.raises(RuntimeError, match=r"this adapter was unloaded; make a new one with poem.adapt\(model"):
            use()
    assert poem.adapt(net, "tent")(batch()).shape == (8, 10)


# What callers do around it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["tent", "poem"])
def test_autocast_by_the_caller_reaches_the_network_alone(method: str) -> None:
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
def test_frozen_predicts_with_what_was_learnt_and_leaves_no_trace(method: str, changes: dict[str, Any]) -> None:
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


def test_frozen_leaves_no_trace_before_the_first_batch_either() -> None:
    adapter = learner(method="eta", **LOOSE)
    before = snapshot(adapter)
    with adapter.frozen():
        adapter(batch(3))
    assert snapshot(adapter) == before


def test_an_example_does_not_fix_the_batch_size() -> None:
    plain, tried = (poem.adapt(sharp("gn"), "poem", example=example) for example in (None, batch(1)))
    assert tried._network.doubles is True
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


def test_an_export_goes_through_torch_export() -> None:
    adapter = begun("poem", "gn")
    plain = adapter.export()
    program = torch.export.export(plain, (batch(),)).module()
    torch.testing.assert_close(program(batch(seed=2)), plain(batch(seed=2)))


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


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": float("nan")}, "expected lr to be a number of at least 0 or a Rule, got nan"),
        ({"lr": -1.0}, "expected lr to be a number of at least 0 or a Rule, got -1.0"),
        ({"batch_size": 0}, "expected a batch size, an integer of at least 1, got 0"),
        ({"classes": []}, "different indices"),
        ({"classes": [1, 1]}, "different indices"),
        ({"mean": (0.5, 0.5), "std": (1.0, 1.0)}, r"one value per channel \(3\)"),
        ({"mean": (0.0, 0.0, 0.0), "std": (0.0, 1.0, 1.0)}, "std above 0"),
        ({"precision": "fp8"}, "precision fp32, tf32 or bf16"),
        ({"preset": "imagnet"}, "preset imagenet, cifar or cifar100"),
    ],
    ids=["nan", "negative", "size", "no-class", "twice", "channels", "std", "precision", "preset"],
)
def test_settings_that_mean_nothing_are_refused_at_once(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        poem.adapt(make_net("bn"), "tent", **changes)


NAN, HALF = float("nan"), (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": [1.0, 1.4]}, r"expected classes as integer indices into the logits, got 1\.0"),
        ({"classes": [1, 2.0]}, r"expected classes as integer indices into the logits, got 2\.0"),
        ({"classes": torch.tensor([1.0, 2.0])}, r"integer indices into the logits, got tensor\(1\.\)"),
        ({"classes": np.array([1.5, 2.5])}, r"integer indices into the logits, got .*1\.5"),
        ({"classes": ["1", "2"]}, "integer indices into the logits, got '1'"),
        ({"classes": "12"}, "integer indices into the logits, got '12'"),
        ({"classes": 5}, "integer indices into the logits, got 5"),
        ({"classes": [None]}, "integer indices into the logits, got None"),
        ({"classes": [[1], [2]]}, r"integer indices into the logits, got \[1\]"),
        ({"classes": torch.tensor([[1, 2]])}, r"integer indices into the logits, got tensor\(\[1, 2\]\)"),
        ({"classes": [True, False]}, r"got truth values; use mask.nonzero\(\)\[:, 0\]"),
        ({"classes": np.array([True, False])}, "got truth values"),
        ({"classes": torch.tensor([True, False])}, "got truth values"),
        ({"classes": [-1, 2]}, "different indices"),
        ({"classes": [2**70]}, "different indices"),
        ({"batch_size": NAN}, "expected a batch size, an integer of at least 1, got nan"),
        ({"batch_size": 2.5}, "expected a batch size, an integer of at least 1, got 2.5"),
        ({"batch_size": 8.0}, "expected a batch size, an integer of at least 1, got 8.0"),
        ({"batch_size": True}, "expected a batch size, an integer of at least 1, got True"),
        ({"batch_size": "8"}, "expected a batch size, an integer of at least 1, got '8'"),
        ({"batch_size": -3}, "expected a batch size, an integer of at least 1, got -3"),
        ({"batch_size": 2**70}, "expected a batch size, an integer of at least 1, got 1180"),
        ({"seed": 1.5}, "expected an integer seed, got 1.5"),
        ({"seed": "0"}, "expected an integer seed, got '0'"),
        ({"seed": None}, "expected an integer seed, got None; leave it out for 0"),
        ({"seed": True}, "expected an integer seed, got True"),
        ({"seed": NAN}, "expected an integer seed, got nan"),
        ({"seed": 2**70}, "expected an integer seed, got 1180"),
        ({"mean": (NAN, 0.0, 0.0), "std": HALF}, r"mean and std as finite numbers, .* got \(nan, 0\.0, 0\.0\)"),
        ({"mean": (math.inf, 0.0, 0.0), "std": HALF}, "expected mean and std as finite numbers"),
        ({"mean": HALF, "std": (NAN, 1.0, 1.0)}, "expected mean and std as finite numbers"),
        ({"mean": HALF, "std": (math.inf, 1.0, 1.0)}, "expected mean and std as finite numbers"),
        ({"mean": ("a", "b", "c"), "std": HALF}, "expected mean and std as finite numbers"),
        ({"mean": "abc", "std": HALF}, "expected mean and std as finite numbers"),
        ({"mean": 0.5, "std": 0.5}, "expected mean and std as finite numbers, one per channel, got 0.5"),
        ({"mean": (), "std": ()}, "one value per channel"),
        ({"lr": math.inf}, "expected lr to be a number of at least 0 or a Rule, got inf"),
    ],
    ids=repr,
)  # fmt: skip
def test_settings_of_the_wrong_kind_are_refused_at_once(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        poem.adapt(make_net("bn"), "tent", **changes)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"classes": np.array([3, 1])}, {"classes": [3, 1]}),
        ({"classes": torch.tensor([3, 1])}, {"classes": [3, 1]}),
        ({"classes": range(1, 4)}, {"classes": [1, 2, 3]}),
        ({"batch_size": np.int64(4)}, {"batch_size": 4}),
        ({"seed": np.int64(3)}, {"seed": 3}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"mean": np.array(HALF), "std": torch.tensor(HALF)}, {"mean": HALF, "std": HALF}),
        ({"mean": [0], "std": [1]}, {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}),
        ({"lr": np.float64(0.5)}, {"lr": 0.5}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_numbers_of_numpy_and_torch_are_settings_like_any(given: dict[str, Any], plain: dict[str, Any]) -> None:
    one, other = poem.adapt(sharp(), "poem", **given), poem.adapt(sharp(), "poem", **plain)
    for seed in (1, 2):
        assert torch.equal(one(batch(seed=seed)), other(batch(seed=seed)))
    assert snapshot(one)[1] == snapshot(other)[1]
    assert one.totals.updates > 0


def test_a_learning_rate_of_zero_is_allowed_and_moves_nothing() -> None:
    adapter = poem.adapt(sharp(), "tent", lr=0)
    start = {name: tensor.clone() for name, tensor in adapter.state_dict()["tensors"].items()}
    adapter(batch())
    assert adapter.totals.updates > 0
    moved = [name for name, tensor in adapter.state_dict()["tensors"].items() if not torch.equal(tensor, start[name])]
    assert not [name for name in moved if name.startswith("moved/")]


def test_a_class_mask_beyond_the_logits_is_refused() -> None:
    adapter = poem.adapt(make_net("bn"), "tent", classes=[0, 99])
    with pytest.raises(ValueError, match="expected classes below 10, the number of logits, got 99"):
        adapter(batch())


def test_images_in_levels_are_refused_by_methods_that_augment() -> None:
    adapter = poem.adapt(make_net("bn"), "roid", **UNIT)
    with pytest.raises(ValueError, match=r"roid augments images and expects them in \[0, 1\]"):
        adapter(batch() * 255)


def test_a_state_of_other_frozen_weights_is_refused() -> None:
    """The head does not move, but a state made with another one belongs to another model."""
    net, other = make_net("bn"), make_net("bn")
    with torch.no_grad():
        other.get_parameter("fc.weight").add_(1.0)
    state = poem.adapt(net, "tent").state_dict()
    with pytest.raises(ValueError, match="load the same weights into the model first"):
        poem.adapt(other, "tent").load_state_dict(state)


def test_bytes_are_refused_where_the_normalisation_is_ours() -> None:
    adapter = poem.adapt(make_net("bn"), "tent", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    before = adapter.state_dict()["tensors"]
    with pytest.raises(ValueError, match="divide by 255"):
        adapter(255 * toys.images(4, 0))
    after = adapter.state_dict()["tensors"]
    assert all(torch.equal(before[key], after[key]) for key in before)
    adapter(toys.images(4, 0))


def test_a_preset_for_a_recipe_is_told_to_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    poem.adapt(make_net("bn"), poem.recipe("tent"), preset="cifar")
    assert "a recipe is taken as it is" in caplog.text
