"""Tensors of the state are replaced where an update is allowed: many at once are replaced as each by itself."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import make_net
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from toys import stream

import poem
from poem.engine.state import MANY, SMALL, update_where
from poem.parts import Blended, Memory, Nothing

VIEWS = ("view", "_unsafe_view", "split", "split_with_sizes", "detach", "alias", "t", "transpose", "expand", "select",
         "slice", "unsqueeze", "squeeze", "permute", "as_strided", "unbind", "reshape")  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts operations that compute: on a GPU, a kernel or more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def resnet50(seed: int) -> Memory:
    """As much as 53 layers with five copies remember."""
    rng, made = torch.Generator().manual_seed(seed), Memory()
    for layer in range(53):
        channels = 64 << layer % 6
        for name in ("mean", "var", "last_mean", "last_var", "mean_moves", "var_moves"):
            made[f"{layer}.{name}"] = torch.randn(5, channels, generator=rng)
        made[f"{layer}.share"] = torch.randn(5, 1, generator=rng)
        made[f"{layer}.images"] = torch.randn((), generator=rng)
    return made


def odd(seed: int) -> Memory:
    """Types, shapes, strides and sizes that differ."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.randn(2, 3, 4, 4, generator=rng).contiguous(memory_format=torch.channels_last)
    made: Memory = {f"small{n}": torch.randn(n, generator=rng) for n in range(MANY + 2)}
    made |= {f"whole{n}": torch.randint(9, (n, 2), generator=rng) for n in range(MANY + 2)}
    made |= {f"precise{n}": torch.randn(n, generator=rng).double() for n in range(3)}
    made |= {f"flag{n}": torch.rand(n, generator=rng) > 0.5 for n in range(MANY)}
    return made | {"images": images, "large": torch.randn(SMALL + 1, generator=rng), "across": images[0].mT[:, :, 1]}


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("make", [resnet50, odd])
def test_many_tensors_are_replaced_as_each_by_itself(make: Any, allowed: bool) -> None:
    mine, new, flag = make(0), make(1), torch.tensor(allowed)
    for name in list(new)[:3]:
        new[name] = new[name] * (torch.nan if new[name].is_floating_point() else 1)
    wanted = {name: torch.where(flag, new[name], mine[name]) for name in mine}
    given = [*mine.values(), *new.values()]
    order = list(mine)
    update_where(mine, new, flag)
    assert list(mine) == order
    held = {each.untyped_storage().data_ptr() for each in given if each.numel()}
    for name, tensor in wanted.items():
        got = mine[name]
        assert (got.dtype, got.shape, got.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        torch.testing.assert_close(got, tensor, rtol=0, atol=0, equal_nan=True)
        assert not got.numel() or got.untyped_storage().data_ptr() not in held, "nothing of a caller's"


def test_what_is_broadcast_or_of_another_type_is_as_torch_has_it() -> None:
    rng = torch.Generator().manual_seed(0)
    mine: Memory = {f"{n}": torch.randn(4, generator=rng) for n in range(MANY + 2)}
    new: Memory = {key: torch.randn(4, generator=rng) for key in mine}
    new["0"], new["1"] = new["0"].double(), new["1"][:1]
    for flag in (torch.tensor(True), torch.tensor([True, False, True, True])):
        found = dict(mine)
        update_where(found, new, flag)
        for key, old in mine.items():
            wanted = torch.where(flag, new[key], old)
            assert found[key].dtype == wanted.dtype
            assert torch.equal(found[key], wanted)


def test_a_network_of_53_layers_is_replaced_by_few_operations() -> None:
    mine, new, flag = resnet50(0), resnet50(1), torch.tensor(True)
    with Operations() as seen:
        update_where(mine, new, flag)
    assert len(new) == 424
    assert seen.count == {"cat": 2, "where": 1}


def adapter(**settings: Any) -> poem.Adapter:
    """One that only blends."""
    given: dict[str, Any] = {"parameters": Nothing(), "statistics": Blended(), "guard": False, **settings}
    made: poem.Adapter = poem.adapt(make_net("bn", sharpness=10.0), "bn", **given)
    return made


def test_what_is_saved_is_each_tensor_and_not_what_it_is_a_view_of(tmp_path: Path) -> None:
    one, batches = adapter(), stream("cpu", 3)
    one(batches[0])
    memory: dict[str, Tensor] = one._state.memory
    joined = [each for each in memory.values() if each.untyped_storage().nbytes() > each.nbytes]
    assert len(joined) >= MANY, "tensors were joined"
    for tensor in one.state_dict()["tensors"].values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    one.save(tmp_path / "state.safetensors")
    assert (tmp_path / "state.safetensors").stat().st_size < 2 * sum(each.nbytes for each in memory.values()) + 2**16
    other = adapter()
    other.load(tmp_path / "state.safetensors")
    twin = copy.deepcopy(one)
    for batch in batches[1:]:
        answer = one(batch)
        assert torch.equal(other(batch), answer)
        assert torch.equal(twin(batch), answer)


def test_a_batch_that_is_not_kept_leaves_the_state_as_it_was() -> None:
    one, batches = adapter(), stream("cpu", 2)
    one(batches[0])
    before = {name: tensor.clone() for name, tensor in one.state_dict()["tensors"].items()}
    snapshot = one._state.snapshot()
    one(batches[1])
    now = one.state_dict()["tensors"]
    assert any(not torch.equal(now[name], tensor) for name, tensor in before.items())
    one._state.restore(snapshot)
    assert all(torch.equal(one._state.memory[name.removeprefix("memory/")], tensor)
               for name, tensor in before.items() if name.startswith("memory/"))  # fmt: skip


def test_a_batch_costs_a_bounded_number_of_operations_for_each_layer() -> None:
    """Of `Blended` as torch computes it."""
    one, batches = adapter(), stream("cpu", 3)
    one(batches[0])
    one(batches[1])
    with Operations() as seen:
        one(batches[2])
    layers = sum(isinstance(each, torch.nn.BatchNorm2d) for each in make_net("bn").modules())
    assert seen.count["where"] < 10 * layers, "of each layer's memory none of its own"
    assert sum(seen.count.values()) < 150 * layers, seen.count
