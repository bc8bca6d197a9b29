"""Many small tensors of a memory lie in a few blocks, and are copied with them."""

from __future__ import annotations

import torch
from nets import make_net
from tape import installed
from toys import images

import poem
from poem.accelerate.packed_memory import MemoryLayout

MEMORY = {f"layer{n}.{name}": torch.full(shape, float(n)) for n in range(6)
          for name, shape in (("mean", (2, 3)), ("images", ()))}  # fmt: skip


def test_tensors_of_one_shape_are_rows_of_one_block() -> None:
    packed = MemoryLayout.of(MEMORY).packed(MEMORY)
    assert [tuple(block.shape) for block in packed.blocks] == [(6,), (6, 2, 3)]
    assert packed.rows.keys() == MEMORY.keys()
    for name, tensor in MEMORY.items():
        torch.testing.assert_close(packed.rows[name], tensor)
    assert packed.is_in({"other": torch.ones(1), **packed.rows})
    assert not packed.is_in(MEMORY)


def test_a_copy_is_in_memory_of_its_own() -> None:
    packed = MemoryLayout.of(MEMORY).packed(MEMORY)
    copied = packed.copied()
    packed.blocks[0].zero_()
    torch.testing.assert_close(copied.rows["layer5.mean"], MEMORY["layer5.mean"])
    packed.copy_from(copied)
    torch.testing.assert_close(packed.rows["layer5.mean"], MEMORY["layer5.mean"])


def test_few_tensors_and_large_ones_stay_as_they_are() -> None:
    few = dict(list(MEMORY.items())[:4])
    assert MemoryLayout.of(few).blocks == ()
    assert "large" not in MemoryLayout.of({**MEMORY, "large": torch.zeros(2**17)}).names


def test_the_layout_is_one_of_names_and_shapes_alone() -> None:
    """Not of the order in which tensors came, nor of how they lie: a batch's tensors may be expanded or transposed."""
    other = {name: MEMORY[name] for name in reversed(MEMORY)} | {"layer3.mean": torch.ones(3, 2).mT}
    assert MemoryLayout.of(other) == MemoryLayout.of(MEMORY)
    rows = MemoryLayout.of(other).packed(other).rows
    torch.testing.assert_close(rows["layer3.mean"], torch.ones(2, 3))


def test_loops_that_learn_and_loops_that_do_not_share_packed_memory() -> None:
    with installed():
        adapter = poem.adapt(make_net("bn"), "auto", fast=True)
        for number in range(4):
            adapter(images(1, seed=number))
            with adapter.frozen():
                adapter(images(1, seed=20 + number))
        loops = list(adapter._captures._loops.values())
        assert len(loops) == 2
        assert len({loop._packed.layout for loop in loops}) == 1
        assert [loop.reads().packed is not None for loop in loops] == [True, True]  # type: ignore[union-attr]


def test_after_a_rollback_a_captured_adapter_goes_on_from_the_older_memory() -> None:
    def answers(fast: bool) -> list[torch.Tensor]:
        adapter = poem.adapt(make_net("bn"), "auto", fast=fast)
        found, held = [], None
        for number in range(8):
            if number == 4:
                held = adapter.checkpoint()
            if number == 6:
                adapter.rollback(held)
            found.append(adapter(images(4, seed=number % 6)))
            with adapter.frozen():
                found.append(adapter(images(4, seed=20 + number)))
        return found

    plain = answers(fast=False)
    with installed() as pool:
        fast = answers(fast=True)
    assert sum(each.replays for each in pool.tapes) > 8
    for one, two in zip(plain, fast, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_a_memory_with_another_shape_does_not_fit() -> None:
    layout = MemoryLayout.of(MEMORY)
    assert layout.fits({**MEMORY, "more": torch.ones(1)})
    assert not layout.fits({**MEMORY, "layer0.mean": torch.ones(4, 3)})
    assert not layout.fits({name: tensor for name, tensor in MEMORY.items() if name != "layer0.mean"})
