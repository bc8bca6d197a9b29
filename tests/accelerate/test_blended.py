"""`Blended` statistics by kernels of our own are those of the part.

Without a GPU the kernels run in Triton's interpreter (see conftest.py): the same code, number by number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from interpreted import round_to_nearest, triton_or_skip
from nets import make_net
from torch import Tensor, nn
from toys import stream

import poem
from poem.accelerate import blended
from poem.engine.acceleration import Acceleration
from poem.engine.norm_layers import ForwardContext, PatchedNorm
from poem.parts import Blended, FromBatch, Memory, Nothing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAST = torch.channels_last
KEY = "statistics.norm"
TWO = Blended((0.5, 1.0), (1.0, 0.05), (0.0, 3.0))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels, which the library takes on whatever device there is; interpreted, as few programs as can be."""
    triton_or_skip(monkeypatch)
    monkeypatch.setattr(blended, "DEVICES", ("cuda", "cpu"))
    if DEVICE == "cpu":
        monkeypatch.setattr(blended.kernels(), "WIDE", 128)
    return blended.kernels()


class ByKernels(Acceleration):
    """Asks the kernels, and nothing else; counts the layers that they took."""

    taken = 0

    def copies_norm(
        self, norm: PatchedNorm, x: Tensor, context: ForwardContext, key: str
    ) -> tuple[Tensor, Memory] | None:
        """By the kernels, if they take it."""
        made = blended.fused(norm, x, context, key)
        self.taken += made is not None
        return made


def bn(channels: int, kind: type[nn.BatchNorm2d] = nn.BatchNorm2d) -> nn.BatchNorm2d:
    """A layer whose every tensor is drawn."""
    rng = torch.Generator().manual_seed(1)
    layer = kind(channels).requires_grad_(False)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.normal_(generator=rng)
    layer.running_var.uniform_(0.5, 2.0, generator=rng)
    layer.weight.normal_(generator=rng)
    layer.bias.normal_(generator=rng)
    return layer.to(DEVICE)


@dataclass
class Pass:
    """A layer that is called batch after batch, and its memory."""

    statistics: Blended
    acceleration: Acceleration
    layer: nn.BatchNorm2d
    context: ForwardContext = field(init=False)
    memory: Memory = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.norm = PatchedNorm("norm", self.layer, lambda: self.context, self.acceleration, swappable=False)
        self.memory = self.memory or self.statistics.start_layer(KEY, self.norm)

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The output for all copies; the memory moves."""
        self.context = ForwardContext(self.statistics, self.memory, mask, copies=self.statistics.copies)
        with torch.no_grad():
            y = self.norm._normalised(x, [], {}, self.context, KEY)
        self.memory = {**self.memory, **self.context.record}
        return y


def draw(images: int, channels: int, side: int, seed: int, *, copies: int, mean: float = 1.0) -> Tensor:
    """Copies of some images, each image and copy with another mean and spread, as in a deep layer."""
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randn(copies * images, channels, side, side, generator=rng)
    scale = 0.5 + torch.rand(copies * images, channels, 1, 1, generator=rng)
    shift = mean + torch.randn(copies * images, channels, 1, 1, generator=rng)
    return (noise * scale + shift).to(DEVICE).contiguous(memory_format=LAST)


def assert_same(ours: Pass, theirs: Pass, one: Tensor, other: Tensor) -> None:
    """Outputs within the rounding of their type, memories within that of single precision."""
    assert one.dtype == other.dtype
    assert one.stride() == other.stride()
    close = 1e-4 if one.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(one, other, equal_nan=True, rtol=close, atol=close)
    assert ours.memory.keys() == theirs.memory.keys()
    for name, wanted in theirs.memory.items():
        got = ours.memory[name]
        assert got.is_contiguous() or got.stride() == wanted.stride()
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=1e-5, equal_nan=True, msg=f"{name}: {got} and {wanted}")


def of(*kept: int, among: int) -> Tensor:
    """A mask that keeps these."""
    return torch.tensor([place in kept for place in range(among)], device=DEVICE)


STREAMS: dict[str, list[tuple[int, int, Tensor | None]]] = {  # images, side, and which count
    "one image at first": [(1, 5, None), (1, 5, None), (1, 40, None), (3, 5, None)],
    "a batch at first": [(7, 9, None), (2, 16, None), (1, 3, None)],
    "masks": [(3, 7, of(0, 2, among=3)), (3, 7, of(1, among=3)), (5, 4, of(0, 1, 4, among=5)), (3, 7, None)],
    "one that counts at first": [(4, 6, of(2, among=4)), (4, 6, of(1, among=4)), (4, 6, None)],
    "none that counts": [(2, 6, of(among=2)), (3, 6, of(0, 1, among=3)), (2, 6, of(among=2)), (2, 6, None)],
}


@pytest.mark.parametrize("which", list(STREAMS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("statistics", "channels"), [(Blended(), 24), (TWO, 70)], ids=["five copies", "two"])
def test_outputs_and_memory_are_those_of_the_part(
    statistics: Blended, channels: int, dtype: torch.dtype, which: str, fused: Any
) -> None:
    kernels = ByKernels()
    ours, theirs = (Pass(statistics, each, bn(channels)) for each in (kernels, Acceleration()))
    for seed, (images, side, mask) in enumerate(STREAMS[which]):
        x = draw(images, channels, side, seed, copies=statistics.copies).to(dtype)
        assert_same(ours, theirs, ours(x, mask), theirs(x, mask))
    assert kernels.taken == len(STREAMS[which])
    assert not torch.equal(ours.memory[f"{KEY}.mean"], Pass(statistics, kernels, bn(channels)).memory[f"{KEY}.mean"])


def test_images_and_stretches_are_added_up_some_at_a_time(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "ADDED", 4)
    monkeypatch.setattr(fused, "WIDE", 16)
    ours, theirs = Pass(TWO, ByKernels(), bn(24)), Pass(TWO, Acceleration(), bn(24))
    for seed, (images, side, mask) in enumerate([(11, 2, None), (11, 2, of(0, 5, 9, among=11)), (2, 30, None)]):
        x = draw(images, 24, side, seed, copies=2)
        assert_same(ours, theirs, ours(x, mask), theirs(x, mask))


def test_rows_outside_the_mask_are_normalised_like_the_others(fused: Any) -> None:
    x, mask = draw(3, 8, 6, 0, copies=2), of(0, 1, among=3)
    y = Pass(TWO, ByKernels(), bn(8))(x, mask)
    assert y.isfinite().all()
    few = x.unflatten(0, (2, 3))[:, :2].flatten(0, 1).contiguous(memory_format=LAST)
    alone = Pass(TWO, ByKernels(), bn(8))(few)
    torch.testing.assert_close(y.unflatten(0, (2, 3))[:, :2].flatten(0, 1), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kept", [(0, 1), (0, 2)], ids=["outside the mask", "inside"])
def test_what_is_not_finite_spoils_what_it_spoils_in_the_part(kept: tuple[int, ...], value: float, fused: Any) -> None:
    ours, theirs = Pass(TWO, ByKernels(), bn(8)), Pass(TWO, Acceleration(), bn(8))
    x, mask = draw(3, 8, 6, 0, copies=2), of(*kept, among=3)
    for place in (0, 5):  # the place that sums are taken about, and another
        x[2, 4, 0, place] = value
        one, other = ours(x, mask), theirs(x, mask)
        assert torch.equal(one.isfinite(), other.isfinite())
        spoilt = ours.memory[f"{KEY}.last_var"].isnan()
        assert torch.equal(spoilt, theirs.memory[f"{KEY}.last_var"].isnan())
        assert bool(spoilt.any()) == (2 in kept)


def test_a_mean_far_from_zero_does_not_cost_the_variance(fused: Any) -> None:
    x = 1000 + 0.1 * draw(4, 8, 16, 0, copies=2)
    ours = Pass(TWO, ByKernels(), bn(8))
    ours(x)
    exact = x.double().unflatten(0, (2, 4)).transpose(1, 2).flatten(2).var(2, correction=0)
    torch.testing.assert_close(ours.memory[f"{KEY}.last_var"].double(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("images", "side"), [(1, 40), (9, 5)])
def test_three_kernels_a_layer(images: int, side: int, fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Pass(TWO, ByKernels(), bn(8))
    layer(draw(images, 8, side, 0, copies=2))  # the trial of the kernels, if this is the first test
    launched: Counter[str] = Counter()
    for name in ("_collect", "_remember", "_scaled"):
        monkeypatch.setattr(fused, name, Launches(name, getattr(fused, name), launched))
    layer(draw(images, 8, side, 1, copies=2))
    assert launched == {"_collect": 1, "_remember": 1, "_scaled": 1}


class Launches:
    """A kernel whose launches are counted."""

    def __init__(self, name: str, kernel: Any, launched: Counter[str]) -> None:
        self.name, self.kernel, self.launched = name, kernel, launched

    def __getitem__(self, grid: Any) -> Any:
        self.launched[self.name] += 1
        return self.kernel[grid]


def test_few_large_images_are_cut_and_many_are_not(fused: Any) -> None:
    assert fused._stretches(112 * 112, 64, images=5)[0] > 40
    assert fused._stretches(7 * 7, 2048, images=5)[0] == 1
    assert fused._stretches(14 * 14, 1024, images=320)[0] == 1
    for rows, channels, images in ((12544, 64, 5), (3136, 256, 1), (49, 24, 2), (1, 8, 1), (50_000, 8, 1)):
        parts, span, _ = fused._stretches(rows, channels, images)
        assert (parts - 1) * span < rows <= parts * span
        assert parts <= fused.PARTS


class Loud(nn.BatchNorm2d):
    """A layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Louder."""
        return 2 * super().forward(x)


@dataclass(frozen=True, repr=False)
class Louder(Blended):
    """Statistics with an answer of their own."""

    def __call__(self, layer: Any, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        """Louder."""
        return 2 * super().__call__(layer, x, mask, memory, key)


Left = Callable[[Pass, Tensor], tuple[Pass, Tensor]]


def changed(one: Pass, **changes: Any) -> Pass:
    """The same layer with something else in it."""
    for name, value in changes.items():
        setattr(one.layer, name, value)
    return one


LEFT: dict[str, Left] = {
    "double precision": lambda one, x: (Pass(TWO, one.acceleration, one.layer.double()), x.double()),
    "half precision of the other kind": lambda one, x: (one, x.half()),
    "contiguous": lambda one, x: (one, x.contiguous()),
    "no scale": lambda one, x: (changed(one, weight=None, bias=None), x),
    "a forward of its own": lambda one, x: (Pass(TWO, one.acceleration, bn(8, Loud)), x),
    "statistics of a subclass": lambda one, x: (
        Pass(Louder(TWO.weights, TWO.rates, TWO.doubts), one.acceleration, one.layer), x,
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", list(LEFT))
def test_what_the_kernels_do_not_take_is_the_parts(which: str, fused: Any) -> None:
    kernels, x = ByKernels(), draw(3, 8, 4, 0, copies=2)
    ours, given = LEFT[which](Pass(TWO, kernels, bn(8)), x)
    theirs, _ = LEFT[which](Pass(TWO, Acceleration(), bn(8)), x)
    one, other = ours(given), theirs(given)
    assert kernels.taken == 0
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert all(torch.equal(ours.memory[name], tensor) for name, tensor in theirs.memory.items())


def test_a_pass_that_is_learnt_from_is_the_parts(fused: Any) -> None:
    kernels = ByKernels()
    layer, x = Pass(TWO, kernels, bn(8)), draw(3, 8, 4, 0, copies=2)
    layer.context = ForwardContext(TWO, layer.memory, copies=2)
    y = layer.norm._normalised(x.requires_grad_(), [], {}, layer.context, KEY)
    assert y.requires_grad
    assert kernels.taken == 0
    y = layer.norm._normalised(x.detach(), [], {}, layer.context, KEY)
    assert not y.requires_grad
    assert kernels.taken == 1, "nothing requires a gradient"
    layer.layer.weight.requires_grad_()
    assert layer.norm._normalised(x.detach(), [], {}, layer.context, KEY).requires_grad
    assert kernels.taken == 1


def test_a_layer_without_memory_and_other_statistics_are_left_alone(fused: Any) -> None:
    one, x = Pass(TWO, ByKernels(), bn(8)), draw(3, 8, 4, 0, copies=2)
    for statistics, memory in ((TWO, {}), (FromBatch(), one.memory), (Blended(), one.memory)):
        context = ForwardContext(statistics, memory, copies=statistics.copies)
        assert blended.fused(one.norm, x, context, KEY) is None


def adapters(count: int, **settings: Any) -> list[poem.Adapter]:
    """Adapters that learn nothing and blend."""
    given: dict[str, Any] = {"parameters": Nothing(), "statistics": Blended(), "fast": False, "guard": False}
    return [poem.adapt(make_net("bn", sharpness=10.0).to(DEVICE), "bn", **given, **settings) for _ in range(count)]


@pytest.mark.parametrize("size", [1, 4])
def test_an_adapter_on_kernels_is_as_near_to_full_precision(
    size: int, fused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":
        round_to_nearest(monkeypatch)
    taken: Counter[bool] = Counter()
    own = blended.fused

    def watched(*given: Any) -> Any:
        made = own(*given)
        taken[made is not None] += 1
        return made

    monkeypatch.setattr(blended, "fused", watched)
    (exact,), (plain, ours) = adapters(1), adapters(2, precision="bf16")
    batches = 2
    layers = sum(isinstance(module, nn.BatchNorm2d) for module in make_net("bn").modules())
    far = torch.zeros(2)
    for batch in stream(DEVICE, batches, size=size):
        mine = ours(batch)
        with monkeypatch.context() as patch:
            patch.setattr(blended, "DEVICES", ())
            wanted, theirs = exact(batch), plain(batch)
        far += torch.stack([(answer - wanted).norm().cpu() for answer in (mine, theirs)])
    tried = 2 if size == 1 else 4  # passes of trials: lazy outputs, and copies that begin late
    assert taken[True] == (batches + tried) * layers, "each layer of each batch once"
    assert 0 < far[0] < 1.5 * far[1]
    saved, wanted = (each.state_dict()["tensors"] for each in (ours, plain))
    for name, tensor in wanted.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0.1, atol=0.1)
        assert saved[name].untyped_storage().nbytes() == tensor.nbytes, "only what is saved"


def test_where_the_kernels_do_not_run_the_part_answers(
    fused: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_: Any, **__: Any) -> None:
        raise RuntimeError("no C compiler found")

    batch = stream(DEVICE, 1)[0]
    monkeypatch.setattr(fused, "remembered", no_compiler)
    monkeypatch.setattr(blended.TRITON, "_works", {})
    one, other = adapters(2, precision="bf16")
    answer = one(batch)
    assert [record.message for record in caplog.records if "no C compiler found" in record.message] != []
    monkeypatch.setattr(blended, "DEVICES", ())
    assert torch.equal(answer, other(batch))
