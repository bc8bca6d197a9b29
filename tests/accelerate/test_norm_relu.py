"""ReLU inside the kernels of norm layers is ReLU after them, and only where nothing can tell the difference.

Without a GPU the kernels run in Triton's interpreter (see conftest.py): the same code, number by number.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from inside import branch_backward, doubles, moving, network
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from toys import stream

import poem
from poem.accelerate import batch_norm, norm_relu, sample_norms
from poem.accelerate.norm_relu import NormReLU
from poem.parts import SGD, Clipped, Everyone, Mixed, Source
from poem.parts.base import Memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAST = torch.channels_last
BF16 = torch.bfloat16


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels of batch norm and of group norm, which the library takes on whatever device there is."""
    pytest.importorskip("triton")
    for module in (batch_norm, sample_norms):
        monkeypatch.setattr(module, "DEVICES", ("cuda", "cpu"))
        module.TRITON.work(torch.device(DEVICE))  # tried before we count
    return batch_norm.kernels(), sample_norms.kernels()[0]


@pytest.fixture
def clipped(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every call of a norm layer by kernels, whether it had ReLU inside."""
    seen: list[bool] = []

    def counting(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            seen.append(named["relu"])
            return own(*args, **named)

        return call

    for module, name in ((kernels[0], "normed"), (kernels[0], "normed_by"), (kernels[1], "normed")):
        monkeypatch.setattr(module, name, counting(getattr(module, name)))
    return seen


def drawn(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], Tensor]:
    """An input, scale and shift of each group, and a gradient, which is not channels last."""
    rng = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(shape, generator=rng) + 5).to(DEVICE, dtype).contiguous(memory_format=LAST)
    affine = [torch.randn(shape[1], generator=rng).to(DEVICE).requires_grad_() for _ in range(2 * groups)]
    return x.requires_grad_(), affine, torch.randn(shape, generator=rng).to(DEVICE, dtype)


def compared(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], x: Tensor, affine: list[Tensor], given: Tensor
) -> None:
    """Output and gradients against double precision, masked where the exact output is too near zero to have a sign."""
    exact, twins = x.detach().double().requires_grad_(), [each.detach().double().requires_grad_() for each in affine]
    before = theirs(exact, *twins)
    given = torch.where(before.abs() > 1e-3, given, 0)
    wanted = torch.autograd.grad(before.relu(), [exact, *twins], given.double())
    y = ours(x, *affine)
    mine = torch.autograd.grad(y, [x, *affine], given)
    assert (y == 0).any()
    for one, other in zip((y, *mine), (before.relu(), *wanted), strict=True):
        far = (one.double() - other).abs().max() / (1 + other.abs().max())
        assert far < (1e-4 if x.dtype == torch.float32 else 2e-2)


SHAPES = [((4, 24, 9, 9), 2), ((2, 70, 12, 11), 1), ((4, 64, 16, 16), 2), ((2, 8, 1, 1), 1)]


@pytest.mark.parametrize("small", [0, 1024])
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_batch_norm_with_relu_is_relu_after_it(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, small: int, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels[0], "SMALL", small)

    def theirs(x: Tensor, *affine: Tensor) -> Tensor:
        pairs = zip(x.chunk(groups), affine[::2], affine[1::2], strict=True)
        return torch.cat([F.batch_norm(half, None, None, weight, bias, training=True) for half, weight, bias in pairs])

    x, affine, given = drawn(shape, groups, dtype)
    compared(lambda x, *affine: batch_norm.Normed.apply(x, 1e-5, True, *affine), theirs, x, affine, given)


@pytest.mark.parametrize("workers", [528, 1], ids=["stretches", "one program per sample"])
@pytest.mark.parametrize(
    ("shape", "groups", "halves"),
    [((4, 24, 9, 9), 6, 2), ((2, 70, 12, 11), 7, 1), ((4, 64, 8, 8), 32, 2), ((2, 130, 4, 4), 1, 1)],
)
def test_group_norm_with_relu_is_relu_after_it(
    shape: tuple[int, ...], groups: int, halves: int, workers: int, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels[1], "WORKERS", workers)
    monkeypatch.setattr(kernels[1], "LEAST", 32)

    def theirs(x: Tensor, *affine: Tensor) -> Tensor:
        pairs = zip(x.chunk(halves), affine[::2], affine[1::2], strict=True)
        return torch.cat([F.group_norm(half, groups, weight, bias) for half, weight, bias in pairs])

    x, affine, given = drawn(shape, halves, BF16)
    compared(lambda x, *affine: sample_norms.Normed.apply(x, 1e-5, groups, True, *affine), theirs, x, affine, given)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("shape", "groups"), [*SHAPES, ((1, 5, 3, 4), 1)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_given_statistics_by_kernels_are_batch_norm_in_eval_mode(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, relu: bool, kernels: Any
) -> None:
    rng = torch.Generator().manual_seed(1)
    mean, var = torch.randn(shape[1], generator=rng) + 5, torch.rand(shape[1], generator=rng) + 5
    mean, var = mean.to(DEVICE), var.to(DEVICE)

    def theirs(x: Tensor, *affine: Tensor) -> Tensor:
        pairs = zip(x.chunk(groups), affine[::2], affine[1::2], strict=True)
        return torch.cat([F.batch_norm(half, mean.to(x), var.to(x), weight, bias) for half, weight, bias in pairs])

    def ours(x: Tensor, *affine: Tensor) -> Tensor:
        y: Tensor = batch_norm.NormedBy.apply(x, mean, var, 1e-5, relu, *affine)
        return y if relu else y.relu()

    compared(ours, theirs, *drawn(shape, groups, dtype))
    x, affine, given = drawn(shape, groups, dtype)
    alone = torch.autograd.grad(batch_norm.NormedBy.apply(x, mean, var, 1e-5, relu, *affine), [x], given)
    both = torch.autograd.grad(batch_norm.NormedBy.apply(x, mean, var, 1e-5, relu, *affine), [x, *affine], given)
    assert torch.equal(alone[0], both[0])


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_relu_inside_has_the_bits_of_relu_outside(kind: str, kernels: Any) -> None:
    x, (weight, bias), given = drawn((2, 8, 6, 5), 1, BF16)
    x.data[1, 3, 2, 2] = torch.nan
    call = batch_norm.Normed if kind == "batch" else sample_norms.Normed
    args = (1e-5,) if kind == "batch" else (1e-5, 4)
    found = []
    for relu in (True, False):
        y = call.apply(x, *args, relu, weight, bias)
        y = y if relu else F.relu(y, inplace=True)
        found.append((y, *torch.autograd.grad(y, [x, weight, bias], given)))
    assert found[0][0].isnan().any()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


class Block(nn.Module):
    """As torchvision has it: one ReLU for three places."""

    def __init__(self, wide: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, wide, 3, padding=1, bias=False), norm(wide)
        self.conv2, self.bn2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False), norm(wide)
        self.conv3, self.bn3 = nn.Conv2d(wide, wide, 1, bias=False), norm(wide)
        self.relu: nn.Module = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)

        out = self.conv3(out)
        out = self.bn3(out)
        out += identity
        return self.relu(out)


def net(norm: Callable[[int], nn.Module] = nn.BatchNorm2d, body: Callable[..., nn.Module] = Block) -> nn.Module:
    """A few blocks between a stem and a head."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm(8), nn.ReLU(inplace=True))
    layers = [stem, *(body(8, norm) for _ in range(2)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
    made = nn.Sequential(*layers).eval().to(DEVICE)
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
            nn.init.uniform_(module.weight, 0.7, 1.3)
            nn.init.uniform_(module.bias, -0.2, 0.2)
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            assert module.running_var is not None
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.6, 1.4)
    return made


def groups(wide: int) -> nn.Module:
    return nn.GroupNorm(4, wide)


def batches() -> list[Tensor]:
    """Two of them, small: an interpreter reads them."""
    return [batch[..., ::2, ::2].contiguous() for batch in stream(DEVICE, 2, size=4)]


def adapted(model: nn.Module, method: str = "tent", **settings: Any) -> poem.Adapter:
    """An adapter in half precision, which learns from every sample."""
    learns = {} if method in ("source", "bn") else {"select": Everyone(), "lr": 0.02}
    if method == "poem":
        learns |= {"rounds": 1, "split": "2"}
    given: dict[str, Any] = {"precision": "bf16", "fast": False, **learns, **settings}
    adapter: poem.Adapter = poem.adapt(model, method, **given)
    return adapter


def answers(adapter: poem.Adapter) -> list[Tensor]:
    """To two batches, and then what has moved."""
    found = [adapter(batch) for batch in batches()]
    return [*found, *moving(adapter).values()]


def same(model: nn.Module, monkeypatch: pytest.MonkeyPatch, method: str = "tent", **settings: Any) -> poem.Adapter:
    """An adapter that answered and learnt as one whose ReLUs all run."""
    adapter = adapted(model, method, **settings)
    mine = answers(adapter)
    with monkeypatch.context() as patch:
        patch.setattr(NormReLU, "follows", lambda *_: False)
        theirs = answers(adapted(model, method, **settings))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    return adapter


@pytest.mark.parametrize("method", ["source", "bn", "tent", "poem"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, groups], ids=["batch norm", "group norm"])
def test_an_adapter_is_the_same_with_relu_inside(
    norm: Callable[[int], nn.Module], method: str, clipped: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = same(net(norm), monkeypatch, method)
    half = len(clipped) // 2  # then those of the other adapter
    assert any(clipped[:half])
    assert not any(clipped[half:])
    if method == "poem":
        assert doubles(adapter)
        assert branch_backward(adapter).right


def test_every_norm_but_the_last_of_a_block_has_its_relu_inside(clipped: list[bool]) -> None:
    adapter = adapted(net(), "bn")
    adapter(batches()[0])  # its first pass has hooks of our own on every layer
    clipped.clear()
    adapter(batches()[0])
    assert clipped == [True, True, True, False, True, True, False]


class Kept(Block):
    """Other bodies: whether what they do with a norm's output lets ReLU inside."""

    def forward(self, x: Tensor) -> Any:
        return x + self.body(x)

    def body(self, x: Tensor) -> Any:
        raise NotImplementedError


class Nested(Kept):
    def body(self, x: Tensor) -> Any:
        return self.conv2(self.relu(self.bn1(self.conv1(x))))


class NestedNext(Kept):
    def body(self, x: Tensor) -> Any:
        if x.dim() == 4:
            x = self.bn1(self.conv1(x))
            x = self.conv2(self.relu(x))
        return x


class Returned(Kept):
    def body(self, x: Tensor) -> Any:
        x = self.bn1(x)
        return self.relu(x)


class Overwritten(Kept):
    """Whoever keeps the output reads what an in-place ReLU left there."""

    def body(self, x: Tensor) -> Any:
        x = self.bn1(self.conv1(x))
        y = self.relu(x)
        return y + 2 * x


class Statement(Kept):
    def body(self, x: Tensor) -> Any:
        x = self.bn1(self.conv1(x))
        self.relu(x)
        return x


class Through(Kept):
    """As timm has it, with nothing where a layer may be."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.drop = nn.Identity()

    def body(self, x: Tensor) -> Any:
        x = self.bn1(self.conv1(x))
        x = self.drop(x)
        x = self.relu(x)
        return x


class NotInPlace(Nested):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.relu = nn.ReLU()


@pytest.mark.parametrize("body", [Nested, NestedNext, Returned, Overwritten, Statement, Through, NotInPlace])
def test_relu_that_must_come_next_is_inside(
    body: type[Block], clipped: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    same(net(body=body), monkeypatch)
    assert clipped[3:6] == [True, True, True], "in the second pass; the first has hooks of ours"


class KeptBefore(Kept):
    """A name for what was there before a ReLU that is not in place."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.relu = nn.ReLU()

    def body(self, x: Tensor) -> Any:
        x = self.bn1(self.conv1(x))
        y = self.relu(x)
        return y + x


class InFinally(KeptBefore):
    def body(self, x: Tensor) -> Any:
        try:
            x = self.bn1(self.conv1(x))
            return self.relu(x)
        finally:
            self.seen = x.sum()


class InClosure(KeptBefore):
    def forward(self, x: Tensor) -> Any:
        return self.body(x) + self.later()  # type: ignore[no-untyped-call]

    def body(self, x: Tensor) -> Any:
        self.later = lambda: x
        x = self.bn1(self.conv1(x))
        return self.relu(x)


class Read(Kept):
    def body(self, x: Tensor) -> Any:
        x = self.bn1(self.conv1(x))
        mean = x.mean((2, 3), keepdim=True)
        x = self.relu(x)
        return x + mean


class ReadBeside(Kept):
    def body(self, x: Tensor) -> Any:
        x = self.bn1(self.conv1(x))
        x = x.mean((2, 3), keepdim=True) + self.relu(x)
        return x


class Added(Kept):
    def body(self, x: Tensor) -> Any:
        x = self.bn1(self.conv1(x)) + 0.1
        x = self.relu(x)
        return x


class Six(Nested):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.relu = nn.ReLU6(inplace=True)


class LoudReLU(nn.ReLU):
    def forward(self, input: Tensor) -> Any:
        return 2 * super().forward(input) - 1


class Loud(Nested):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.relu = LoudReLU()


class Property(Kept):
    """What is called is not the child of that name."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.act = nn.ReLU()
        self.__dict__["act"] = nn.Sigmoid()

    def body(self, x: Tensor) -> Any:
        return self.act(self.bn1(self.conv1(x)))


class Shared(nn.Module):
    """Two modules hold the norm layer."""

    def __init__(self, wide: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.one = Nested(wide, norm)
        self.other = KeptBefore(wide, norm)
        self.other.bn1 = self.one.bn1

    def forward(self, x: Tensor) -> Any:
        return self.one(x) + self.other(x)


class Direct(Kept):
    """Hooks and all else around a call are left out."""

    def body(self, x: Tensor) -> Any:
        return self.relu(self.bn1.forward(self.conv1(x)))


class Sometimes(Kept):
    def body(self, x: Tensor) -> Any:
        x = self.bn1(self.conv1(x))
        if len(x) > 4:
            x = self.relu(x)
        return x


NOT_INSIDE = [KeptBefore, InFinally, InClosure, Read, ReadBeside, Added, Six, Loud, Property, Shared, Direct, Sometimes]


@pytest.mark.parametrize("body", NOT_INSIDE)
def test_an_output_that_may_be_read_as_it_was_is_left_as_it_is(
    body: type[Block], clipped: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    same(net(body=body), monkeypatch)
    half = len(clipped) // 2
    assert 0 < sum(clipped[:half]) <= 2, "the stem's alone"


HOOKS: dict[str, Callable[[Any, list[Tensor]], Any]] = {
    "forward": lambda layer, seen: layer.register_forward_hook(lambda m, a, out: seen.append(out.clone())),
    "pre": lambda layer, seen: layer.register_forward_pre_hook(lambda m, args: seen.append(args[0].clone())),
    "backward": lambda layer, seen: layer.register_full_backward_hook(lambda m, i, out: seen.append(out[0].clone())),
    "backward pre": lambda layer, seen: layer.register_full_backward_pre_hook(
        lambda m, out: seen.append(out[0].clone())
    ),
}


@pytest.mark.parametrize("layer", ["bn1", "relu"])
@pytest.mark.parametrize("hook", list(HOOKS))
def test_hooks_see_what_they_would(
    hook: str, layer: str, kernels: Any, clipped: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Tensor]] = []
    for fused in (True, False):
        model: Any = net(body=NotInPlace)
        seen.append([])
        HOOKS[hook](getattr(model[1], layer), seen[-1])
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr(NormReLU, "follows", lambda *_: False)
            answers(adapted(model))
    assert seen[0]
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert any(clipped), "of the other blocks"


def test_a_hook_on_all_modules_sees_them_apart(clipped: list[bool]) -> None:
    adapter = adapted(net(), "bn")
    adapter(batches()[0])
    clipped.clear()
    handle = register_module_forward_hook(lambda *_: None)
    try:
        adapter(batches()[0])
    finally:
        handle.remove()
    assert len(clipped) == 7
    assert not any(clipped)


def test_a_relu_with_another_forward_runs(clipped: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    own = nn.ReLU.forward
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: own(self, x) + 1)
    answers(adapted(net(), "bn"))
    assert clipped
    assert not any(clipped)


class Lowered(Source):
    """Statistics that do something with the layer's output."""

    def __call__(self, layer: Any, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Any:
        return layer.with_source(x) - 0.3


@pytest.mark.parametrize(
    ("settings", "inside"),
    [
        ({"statistics": Source()}, True),
        ({"statistics": Mixed()}, True),
        ({"statistics": Lowered()}, False),
        ({"statistics": Source(), "step": Clipped(SGD())}, False),
    ],
    ids=["source", "mixed", "the user's own", "a row per sample"],
)
def test_statistics_that_are_given(
    settings: dict[str, Any], inside: bool, clipped: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    same(net(), monkeypatch, **settings)
    assert any(clipped) == inside


def test_both_halves_of_a_doubled_batch_have_the_sources_statistics_at_once(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    own = kernels[0].normed_by

    def counting(x: Tensor, mean: Tensor, var: Tensor, affine: Any, eps: float, **named: Any) -> Tensor:
        seen.append(len(affine))
        y: Tensor = own(x, mean, var, affine, eps, **named)
        return y

    monkeypatch.setattr(kernels[0], "normed_by", counting)
    ours = adapted(net(), "poem", statistics=Source())
    mine = answers(ours)
    assert {1, 2} == set(seen)
    assert doubles(ours)
    with monkeypatch.context() as patch:
        patch.setattr(batch_norm, "DEVICES", ())
        theirs = answers(adapted(net(), "poem", statistics=Source()))
    for one, other in zip(mine, theirs, strict=True):
        assert (one - other).norm() < 0.03 * other.norm()


def test_a_layer_without_running_statistics_has_the_batchs(clipped: list[bool]) -> None:
    model = net(lambda wide: nn.BatchNorm2d(wide, track_running_stats=False))
    adapter = poem.adapt(model, "source", precision="bf16", fast=False)
    batch = batches()[0]
    with torch.no_grad(), torch.autocast(DEVICE, dtype=BF16):
        wanted = model(batch.contiguous(memory_format=LAST)).float()
    assert (adapter(batch) - wanted).norm() < 0.03 * wanted.norm()
    assert not clipped


def test_a_network_with_relu_inside_is_as_near_to_the_layers_own(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for norm in (nn.BatchNorm2d, groups):
        batch = batches()[0]
        ours, exact = adapted(net(norm), "source"), adapted(net(norm), "source", precision="fp32")
        with monkeypatch.context() as patch:
            patch.setattr(batch_norm, "DEVICES", ())
            patch.setattr(sample_norms, "DEVICES", ())
            theirs = (adapted(net(norm), "source")(batch) - exact(batch)).norm()
        assert 0 < (ours(batch) - exact(batch)).norm() < 3 * theirs


def test_without_triton_both_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batch_norm, sample_norms):
        monkeypatch.setattr(module, "DEVICES", ("cuda", "cpu"))
        monkeypatch.setattr(module.TRITON, "_modules", None)
        monkeypatch.setattr(module.TRITON, "_imports", False)
        monkeypatch.setattr(module.TRITON, "_works", {})
    called: list[bool] = []
    monkeypatch.setattr(NormReLU, "clipped", lambda *_: called.append(True))
    for norm in (nn.BatchNorm2d, groups):
        for method in ("source", "tent"):
            assert all(each.isfinite().all() for each in answers(adapted(net(norm), method)))
    assert not called


def test_a_changed_model_is_looked_at_again(clipped: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = net()
    adapter = adapted(model, "bn")
    answers(adapter)
    model[1].relu = nn.ReLU6(inplace=True)
    for batch in batches():
        clipped.clear()
        adapter(batch)
    assert clipped == [True, False, False, False, True, True, False]


def test_nothing_is_held_after_a_batch(clipped: list[bool]) -> None:
    adapter = adapted(net(), "poem")
    answers(adapter)
    assert any(clipped)
    relus = network(adapter).acceleration.norm_relu  # type: ignore[attr-defined]
    assert relus._clipped is None


TEXT = """
from torch import nn

class Body(nn.Module):
    def __init__(self, wide, norm):
        super().__init__()
        self.bn1 = norm(wide)
        self.relu = nn.ReLU(inplace=True)
        self.soft = nn.Softplus()

    def forward(self, x):
        x = self.bn1(x)
        x = self.{then}(x)
        return x
"""


@pytest.fixture
def written() -> Iterator[Callable[[str], None]]:
    """Source as Python finds it for a file of this name."""
    name = "<body of a test>"

    def write(text: str) -> None:
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        norm_relu._parsed.cache_clear()
        norm_relu._calls.cache_clear()

    yield write
    linecache.cache.pop(name, None)


@pytest.mark.parametrize(
    ("code", "file", "inside"),
    [
        ("relu", TEXT.format(then="relu"), True),
        ("soft", TEXT.format(then="relu"), False),
        ("relu", "", False),
        ("relu", "not Python", False),
    ],
    ids=["as it was", "edited since", "gone", "broken"],
)
def test_source_counts_only_if_it_is_that_of_the_code(
    code: str,
    file: str,
    inside: bool,
    written: Callable[[str], None],
    clipped: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space: dict[str, Any] = {"__name__": "body"}
    exec(compile(TEXT.format(then=code), "<body of a test>", "exec", dont_inherit=True), space)
    written(file)
    same(net(body=space["Body"]), monkeypatch)
    half = len(clipped) // 2
    assert clipped[3:6] == [True, inside, inside]
    assert len(clipped[:half]) == 6
