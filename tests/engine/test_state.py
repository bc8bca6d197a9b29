"""What is set for a while is put back as it was, not as it usually is."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import adapted, assert_same, differs, eight_views, stream
from compare import assert_same_answers
from inside import fail_checks
from learners import LOOSE, RICH, UNIT, batch, begun, learner, snapshot
from nets import Wrapped, make_net
from torch import Tensor, nn
from toys import images, small_batches

import poem
from poem._util.state_file import load_state, read_state, save_state, state_bytes
from poem.parts import (
    SAM,
    Adam,
    EntropyBelow,
    EveryCalls,
    MeanTeacher,
    NotRedundant,
    PLPDAbove,
    RunningMean,
    StochasticRestore,
)

RESETS: list[tuple[str, dict[str, Any]]] = [
    ("tent", {}),
    ("tent", {"step": Adam()}),
    ("tent", {"statistics": RunningMean(0.2)}),
    ("eata", {"select": EntropyBelow(0.4) & NotRedundant(0.98)}),
    ("sar", {}),
    ("sar", {"step": SAM(0.05, Adam())}),
    ("deyo", {"select": EntropyBelow(0.5) & PLPDAbove(-0.5)}),
    ("roid", {"lr": 0.001}),
    ("memo", {"views": eight_views}),
    ("cotta", {"teacher": MeanTeacher(momentum=0.9, copies=2, unsure=2.0), "recover": StochasticRestore(0.1)}),
    ("rdumb", {"recover": EveryCalls(2)}),
    ("poem", {}),
    ("poem", {"statistics": RunningMean(0.2), "step": Adam(), "threshold": 1.01}),
    ("poem-official", {"select": EntropyBelow(0.4) & PLPDAbove(-0.5) & NotRedundant(0.99)}),
    ("sar+poem", {}),
]


@pytest.mark.parametrize(("method", "changes"), RESETS, ids=[f"{m}{sorted(c)}" for m, c in RESETS])
@pytest.mark.parametrize("kind", ["bn", "ln"])
def test_a_reset_restores_everything(kind: str, method: str, changes: dict[str, Any]) -> None:
    adapter = adapted(kind, method, **changes)
    fresh = adapted(kind, method, **changes).state_dict()
    answers = [adapter(batch) for batch in stream(24)]
    assert adapter.totals.taught > 0
    away = adapter.state_dict()
    assert differs(fresh["tensors"], away["tensors"]) == (method != "memo")
    assert away["calls"] == 2
    adapter.reset()
    state = adapter.state_dict()
    assert_same(state.pop("tensors"), fresh.pop("tensors"))
    assert torch.equal(state.pop("rng"), fresh.pop("rng"))
    assert state == fresh
    assert all(torch.equal(adapter(b), answer) for b, answer in zip(stream(24), answers, strict=True))


def test_reset_forgets_what_the_forward_kept_on_its_modules() -> None:
    class Counting(Wrapped):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return super().forward(x / self.passes)

    net = Counting()
    adapter = poem.adapt(net, "tent")
    first = adapter(images(8, 0))
    assert not torch.equal(adapter(images(8, 0)), first)
    adapter.reset()
    assert_same_answers([adapter(images(8, 0))], [first])
    assert net.passes == 0, "the user's module was never run"


def test_reset_makes_the_checks_of_the_first_batch_again() -> None:
    """A check that failed on one batch is made again in the next stream."""
    adapter = poem.adapt(make_net("bn", sharpness=10.0), "poem", **RICH)
    adapter(images(8, 0))
    fail_checks(adapter)
    adapter.reset()
    fresh = poem.adapt(make_net("bn", sharpness=10.0), "poem", **RICH)
    for each in small_batches(2):
        assert_same_answers([adapter(each)], [fresh(each)])
        assert adapter.last.forwards_computed == fresh.last.forwards_computed
        assert adapter.last.notes == []


@pytest.mark.parametrize("how", ["in place", "through data", "another tensor"])
def test_a_state_is_of_the_weights_that_the_model_has_now(how: str) -> None:
    net: Any = make_net("bn")
    adapter = poem.adapt(net, "tent")
    adapter(images(4, 0))
    old = adapter.state_dict()
    with torch.no_grad():
        if how == "in place":
            net.fc.weight.add_(1.0)
        elif how == "through data":
            net.fc.weight.data.add_(1.0)
        else:
            net.fc.weight = nn.Parameter(net.fc.weight + 1.0)
    with pytest.raises(ValueError, match="load the same weights"):
        adapter.load_state_dict(old)
    poem.adapt(copy.deepcopy(net), "tent").load_state_dict(adapter.state_dict())


def test_a_batch_size_that_was_given_is_not_overruled_by_a_state() -> None:
    giver = poem.adapt(make_net("bn"), "tent", batch_size=8)
    giver(images(8, 0))
    with pytest.raises(ValueError, match="expected a state of batch_size=4"):
        poem.adapt(make_net("bn"), "tent", batch_size=4).load_state_dict(giver.state_dict())
    free = poem.adapt(make_net("bn"), "tent")
    free.load_state_dict(giver.state_dict())
    assert free.lr == giver.lr


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_state_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    adapter = poem.adapt(make_net("bn"), "tent")
    state = adapter.state_dict()
    state["tensors"] = {key: tensor.to(dtype) for key, tensor in state["tensors"].items()}
    with pytest.raises(ValueError, match=r"expected moved/.* \(torch.float32\), got"):
        adapter.load_state_dict(state)


def test_a_state_from_a_pipe_or_a_folder_is_refused(tmp_path: Any) -> None:
    adapter = poem.adapt(make_net("bn"), "tent")
    with pytest.raises(ValueError, match="no regular file"):
        adapter.load(tmp_path)


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
        (lambda state: state.update(schema=99), "expected schema 3, got 99; this version reads only its own"),
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
        (lambda state: state.update(image="16"), "expected image to be the shape of one image or None, got '16'"),
        (lambda state: state.update(image=[3, 0]), r"image to be the shape of one image or None, got \[3, 0\]"),
        (lambda state: state.update(notes=1), r"got \['notes'\] besides"),
        (with_memory("select.mean", torch.zeros(10)), r"only tensors that .* keeps, got \['memory/select.mean'\]"),
        (with_memory("select.second.mean", torch.full((10,), torch.nan)), "expected finite numbers in memory/select.s"),
        (with_memory("select.second.mean", torch.zeros(7)), r"expected memory/select.second.mean of shape \(10,\)"),
        (lambda state: state.clear(), r"expected a state from adapter.state_dict\(\)"),
    ],
    ids=["recipe", "schema", "source", "moved", "step", "memory", "rng", "calls", "shape", "mean", "std", "mask",
         "count", "size", "image", "image-size", "besides", "foreign", "nan", "memory-shape", "empty"],
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


def test_a_state_of_schema_2_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    """Such a state has a hash of EATA's importance, no shape of an image, and memory under other names."""
    adapter = begun()
    state = adapter.state_dict()
    del state["prepared"], state["image"]
    for name in ("mean", "seen"):
        state["tensors"][f"memory/redundancy.{name}"] = state["tensors"].pop(f"memory/select.second.{name}")
    old, before = {**state, "schema": 2, "fisher": None}, snapshot(adapter)
    words = "expected schema 3, got 2; this version reads only its own; run the stream again to make a new one"
    with pytest.raises(ValueError, match=words):
        adapter.load_state_dict(old)
    save_state(old, tmp_path / "old")
    with pytest.raises(ValueError, match=words):
        adapter.load(tmp_path / "old")
    assert snapshot(adapter) == before


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
def test_a_deep_copy_adapts_a_copy_of_the_model(kind: str, method: str, changes: dict[str, Any]) -> None:
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


def test_a_state_of_other_frozen_weights_is_refused() -> None:
    """The head does not move, but a state made with another one belongs to another model."""
    net, other = make_net("bn"), make_net("bn")
    with torch.no_grad():
        other.get_parameter("fc.weight").add_(1.0)
    state = poem.adapt(net, "tent").state_dict()
    with pytest.raises(ValueError, match="load the same weights into the model first"):
        poem.adapt(other, "tent").load_state_dict(state)


def test_states_that_are_read_again_and_again_are_freed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    tensors = {f"t{at}": torch.rand(10 + at) for at in range(200)}
    save_state({"schema": 3, "tensors": tensors, "rng": torch.zeros(4, dtype=torch.uint8)}, path)
    assert_same(load_state(path)["tensors"], tensors)
    load_state(path)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(20):
        load_state(path)
    gc.collect()
    assert sys.getallocatedblocks() - before < 20 * 100, "an object or more of each tensor is kept"


def test_states_with_tensors_of_many_lengths_leave_no_types_behind() -> None:
    import ctypes

    held = {"schema": 3, "rng": torch.zeros(4, dtype=torch.uint8)}
    kept: dict[Any, Any] = getattr(ctypes, "_pointer_type_cache", {})
    state_bytes({**held, "tensors": {"a": torch.rand(7)}})
    before = len(kept)
    for length in range(1000, 1050):
        state_bytes({**held, "tensors": {"a": torch.rand(length)}})
    assert len(kept) - before < 10
    half = torch.rand(3).bfloat16()
    assert torch.equal(read_state(state_bytes({**held, "tensors": {"a": half}}))["tensors"]["a"], half)
