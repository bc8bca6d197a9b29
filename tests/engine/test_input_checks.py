"""Unusual input: what is refused says what was expected, what came and what to type; what is accepted works."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toys
from compare import assert_same_answers
from learners import LOOSE, RICH, UNIT, batch, learner, sharp, snapshot
from nets import Wrapped, make_net
from torch import Tensor, nn
from toys import images, small_batches

import poem
from poem.parts import EntropyBelow, Everything


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
        ("device", "adapt has no device: move the model, model.to"),
        ("compile", "adapt has no compile: fast='auto'"),
        ("amp", "adapt has no amp: precision='bf16'"),
        ("dtype", "adapt has no dtype: precision='bf16'"),
        ("threshhold", "Did you mean threshold?"),
    ],
)
def test_the_error_for_a_misspelt_argument_names_the_nearest(word: str, said: str) -> None:
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
        poem.adapt(lambda x: x, "tent")  # type: ignore[call-overload]


def test_a_model_made_under_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        net = sharp()
    with pytest.raises(ValueError, match="made under inference_mode and cannot learn; build the model outside it"):
        poem.adapt(net, "tent")


class Packed(nn.Module):
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
    adapter, plain = learner(method=method, net=Packed(sharp(), put)), learner(method=method)
    for seed in (1, 2):
        assert torch.equal(adapter(batch(seed=seed)), plain(batch(seed=seed)))
    assert adapter.totals.taught > 0


def test_a_model_that_returns_a_tuple_needs_logits() -> None:
    net = Packed(sharp(), lambda out: (out, None))
    with pytest.raises(TypeError, match=r"a tensor, .logits or \['logits'\]\), got tuple; pass logits=lambda out"):
        learner(net=net)(batch())
    adapter = learner(net=net, logits=lambda out: out[0])
    assert torch.equal(adapter(batch()), learner()(batch()))
    assert adapter.totals.taught > 0


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(batch, classes\), got \(8, 10, 1\); pass logits="):
        learner(net=Packed(sharp(), lambda out: out[..., None]))(batch())


# Names and settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"), [("tnet", "tent"), ("poem-offical", "poem-official"), ("sar+peom", r"sar\+poem")]
)
def test_an_unknown_method_gets_the_nearest_names(name: str, near: str) -> None:
    with pytest.raises(
        ValueError, match=rf"unknown method '{name.replace('+', '[+]')}'. Did you mean .*{near}.*Methods: auto source"
    ):
        poem.adapt(sharp(), name)


@pytest.mark.parametrize("method", ["tent", "eata", "cotta", "memo", "poem"])
def test_cifar10_is_another_name_of_the_cifar_preset(method: str) -> None:
    assert poem.recipe(method, "cifar10") == poem.recipe(method, "cifar") != poem.recipe(method)
    assert poem.adapt(sharp(), "tent", preset="cifar10").recipe == poem.recipe("tent", "cifar")


@pytest.mark.parametrize(
    ("name", "near"), [("selct", "select"), ("treshold", "threshold"), ("learning_rate", ""), ("objective", "")]
)
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
            "expected which to be 'first', 'before-last', 'last' or 'teacher', got 'middle'",
        ),
        ("tent", {"readout": "teacher"}, r"needs a teacher; add teacher=MeanTeacher\(\)"),
        ("tent", {"preset": "mnist"}, "expected preset imagenet, cifar or cifar100, got 'mnist'"),
        ("tent", {"precision": "fp8"}, "expected precision fp32, tf32 or bf16, got 'fp8'"),
        ("tent", {"precision": torch.bfloat16}, "got torch.bfloat16; did you mean 'bf16'"),
        ("tent", {"precision": "fp16"}, "got 'fp16'; did you mean 'bf16'"),
        ("tent", {"fast": "yes"}, "expected fast 'auto', True or False, got 'yes'"),
        ("tent", {"fast": 1}, "expected fast 'auto', True or False, got 1"),
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
        "torch's precision",
        "another precision",
        "fast",
        "fast 1",
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


def test_bytes_are_refused_where_the_normalisation_is_ours() -> None:
    adapter = poem.adapt(make_net("bn"), "tent", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    before = adapter.state_dict()["tensors"]
    with pytest.raises(ValueError, match="divide by 255"):
        adapter(255 * toys.images(4, 0))
    after = adapter.state_dict()["tensors"]
    assert all(torch.equal(before[key], after[key]) for key in before)
    adapter(toys.images(4, 0))


def test_a_preset_for_a_recipe_logs_that_it_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    poem.adapt(make_net("bn"), poem.recipe("tent"), preset="cifar")
    assert "a recipe is taken as it is" in caplog.text


class Line(nn.Module):
    """A network of one or three spatial dimensions."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv: Any = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
        norm: Any = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}[dims]
        torch.manual_seed(dims)
        self.stages = nn.Sequential(
            *[nn.Sequential(conv(a, b, 3, 2, 1), norm(b), nn.ReLU()) for a, b in ((2, 8), (8, 12), (12, 16))]
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(x).flatten(2).mean(2)) * 4
        return logits


@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("method", ["tent", "eata", "sar", "poem", "eta+poem"])
def test_networks_of_one_and_three_dimensions_adapt(method: str, dims: int) -> None:
    net = Line(dims).eval()
    batch = torch.rand(8, 2, *[12] * dims, generator=torch.Generator().manual_seed(0))
    adapter = poem.adapt(net, method, mean=[0.5, 0.5], std=[0.5, 0.5], threshold=2.0) if method != "tent" else (
        poem.adapt(net, method, mean=[0.5, 0.5], std=[0.5, 0.5])
    )  # fmt: skip
    for _ in range(2):
        assert adapter(batch).shape == (8, 5)
    assert adapter.totals.updates > 0
    with pytest.raises(ValueError, match=f"expected a batch of {dims + 2} dimensions"):
        adapter(torch.rand(8, 2, *[12] * (dims + 1)))


@pytest.mark.parametrize("method", ["deyo", "deyo+poem", "roid", "memo", "cotta"])
def test_methods_that_edit_pictures_say_so_for_other_inputs(method: str) -> None:
    net = Line(1).eval()
    with pytest.raises(ValueError, match=r"needs images \(batch, channels, height, width\)"):
        poem.adapt(net, method, mean=[0.5, 0.5], std=[0.5, 0.5])(torch.rand(8, 2, 12))


def test_a_model_that_answers_fewer_images_than_it_got_is_refused() -> None:
    class Dropping(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:-1]

    for method in ("source", "tent", "poem"):
        adapter = poem.adapt(Dropping(), method)
        with pytest.raises(ValueError, match="expected logits for 8 images, got 7"):
            adapter(images(8, 0))
        assert adapter.totals.batches == 0


def test_a_compiled_child_adapts_as_the_module_inside_it() -> None:
    plain, compiled = Wrapped("bn"), Wrapped("bn")
    compiled.net.layer1 = torch.compile(compiled.net.layer1, backend="eager")
    adapters = [poem.adapt(net, "poem", **RICH) for net in (plain, compiled)]
    assert_same_answers(*[[adapter(batch) for batch in small_batches(3)] for adapter in adapters])
    assert len(adapters[0].adapted) == len(adapters[1].adapted)
    assert adapters[0].totals.updates > 0


def test_a_scripted_child_is_refused_by_name() -> None:
    net = Wrapped("bn")
    net.net.layer1 = torch.jit.script(net.net.layer1)
    with pytest.raises(TypeError, match=r"'net.layer1' is a ScriptModule"):
        poem.adapt(net, "tent")


def test_a_lazy_layer_is_refused_by_name() -> None:
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"0\.weight .* run one batch"):
        poem.adapt(net, "tent")


def test_the_error_for_a_loader_of_dictionaries_says_what_is_expected() -> None:
    adapter = poem.adapt(make_net("bn"), "tent")
    said = r"takes no dictionary, and no argument of 'image'; it takes .*hand adapter\(\) the tensor"
    with pytest.raises(TypeError, match=said):
        list(adapter.stream([{"image": images(4, 0)}]))
    with pytest.raises(TypeError, match="expected batches of images"):
        list(adapter.stream(["image"]))


def test_other_batch_sizes_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    adapter = poem.adapt(make_net("bn"), "tent")
    with caplog.at_level(logging.WARNING, logger="poem"):
        for size in (4, 3, 4, 3, 5, 4):
            adapter(images(size, 0))
    assert sum("other sizes" in each.message for each in caplog.records) == 1
