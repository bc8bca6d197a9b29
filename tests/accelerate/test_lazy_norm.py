"""Outputs of norm layers that wait for the addition and the ReLU after them are what torch would compute, bit by bit.

Without a GPU the kernels run in Triton's interpreter (see conftest.py): the same code, number by number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapters import capturing
from inside import branch_backward, captured_sizes, doubles, moving, network
from interpreted import round_to_nearest, triton_or_skip
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from toys import stream

import poem
from poem.accelerate import batch_norm, blended, sample_norms
from poem.accelerate.lazy_norm import LazyNorm, LazyNorms, computed
from poem.parts import SGD, Clipped, Everyone, Mixed, Source
from poem.parts.base import Memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAST = torch.channels_last
BF16 = torch.bfloat16
NEITHER, RELU, ADD, BOTH = (False, False), (False, True), (True, False), (True, True)  # with an addition, with ReLU


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels of batch norm, group norm and `Blended`, which the library takes on whatever device there is."""
    triton_or_skip(monkeypatch)
    if DEVICE == "cpu":
        round_to_nearest(monkeypatch)
        monkeypatch.setattr(blended.kernels(), "WIDE", 128)
    for module in (batch_norm, sample_norms, blended):
        monkeypatch.setattr(module, "DEVICES", ("cuda", "cpu"))
        module.TRITON.work(torch.empty(0, device=DEVICE).device)  # tried before we count, and known as tensors know it
    return batch_norm.kernels(), sample_norms.kernels()[0], blended.kernels()


@pytest.fixture
def ends(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For every output that a kernel wrote, whether something was added, and whether it was clipped."""
    seen: list[tuple[bool, bool]] = []

    def counting(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            seen.append((named["other"] is not None, named["relu"]))
            return own(*args, **named)

        return call

    for place, name in ((0, "normed"), (0, "normed_by"), (1, "normed"), (2, "scaled")):
        monkeypatch.setattr(kernels[place], name, counting(getattr(kernels[place], name)))
    return seen


# The kernels ----------------------------------------------------------------------------------------------------------


def drawn(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """An input and what is added, scale and shift of each group, and a gradient, which is not channels last."""
    rng = torch.Generator().manual_seed(0)
    images = [(3 * torch.randn(shape, generator=rng) + mean).to(DEVICE, dtype) for mean in (5, 0)]
    images = [each.contiguous(memory_format=LAST).requires_grad_() for each in images]
    affine = [torch.randn(shape[1], generator=rng).to(DEVICE).requires_grad_() for _ in range(2 * groups)]
    return images, affine, torch.randn(shape, generator=rng).to(DEVICE, dtype)


def compared(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], shape: tuple[int, ...], groups: int, dtype: torch.dtype
) -> None:
    """ReLU of the sum and of the norm alone, with gradients, against double precision.

    Masked where the exact output is too near zero to have a sign.
    """
    (x, other), affine, given = drawn(shape, groups, dtype)
    for added in ([other], []):
        leaves = [x, *added, *affine]
        exact = [each.detach().double().requires_grad_() for each in leaves]
        before = theirs(exact[0], *exact[1 + len(added) :]) + (exact[1] if added else 0)
        masked = torch.where(before.abs() > 5e-2, given, 0)
        wanted = torch.autograd.grad(before.relu(), exact, masked.double())
        y = ours(x, other if added else None, *affine)
        mine = torch.autograd.grad(y, leaves, masked)
        assert (y == 0).any()
        for one, right in zip((y, *mine), (before.relu(), *wanted), strict=True):
            far = (one.double() - right).abs().max() / (1 + right.abs().max())
            assert far < (1e-4 if dtype == torch.float32 else 2e-2)


SHAPES = [((4, 24, 9, 9), 2), ((2, 70, 12, 11), 1), ((4, 64, 16, 16), 2), ((2, 8, 1, 1), 1)]


def by_halves(call: Callable[[Tensor, Tensor, Tensor], Tensor], groups: int) -> Callable[..., Tensor]:
    """A norm with tensors of its own for each half of the batch."""

    def both(x: Tensor, *affine: Tensor) -> Tensor:
        return torch.cat([call(*each) for each in zip(x.chunk(groups), affine[::2], affine[1::2], strict=True)])

    return both


@pytest.mark.parametrize("small", [0, 1024])
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_batch_norm_with_addition_and_relu(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, small: int, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels[0], "SMALL", small)
    theirs = by_halves(lambda x, scale, shift: F.batch_norm(x, None, None, scale, shift, training=True), groups)
    ours = lambda x, other, *affine: batch_norm.Normed.apply(x, other, 1e-5, True, *affine)  # noqa: E731
    compared(ours, theirs, shape, groups, dtype)


@pytest.mark.parametrize(("shape", "groups"), [*SHAPES, ((1, 5, 3, 4), 1)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_given_statistics_with_addition_and_relu(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, kernels: Any
) -> None:
    rng = torch.Generator().manual_seed(1)
    mean, var = torch.randn(shape[1], generator=rng) + 5, torch.rand(shape[1], generator=rng) + 5
    mean, var = mean.to(DEVICE), var.to(DEVICE)
    theirs = by_halves(lambda x, *affine: F.batch_norm(x, mean.to(x), var.to(x), *affine), groups)

    def ours(x: Tensor, other: Tensor | None, *affine: Tensor) -> Any:
        return batch_norm.NormedBy.apply(x, other, mean, var, 1e-5, True, *affine)

    compared(ours, theirs, shape, groups, dtype)
    (x, other), affine, given = drawn(shape, groups, dtype)
    alone = torch.autograd.grad(ours(x, other, *affine), [x], given)
    together = torch.autograd.grad(ours(x, other, *affine), [x, *affine], given)
    assert torch.equal(alone[0], together[0])


@pytest.mark.parametrize("workers", [528, 1], ids=["stretches", "one program per sample"])
@pytest.mark.parametrize(
    ("shape", "groups", "halves"),
    [((4, 24, 9, 9), 6, 2), ((2, 70, 12, 11), 7, 1), ((4, 64, 8, 8), 32, 2), ((2, 130, 4, 4), 1, 1)],
)
def test_group_norm_with_addition_and_relu(
    shape: tuple[int, ...], groups: int, halves: int, workers: int, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels[1], "WORKERS", workers)
    monkeypatch.setattr(kernels[1], "LEAST", 32)
    theirs = by_halves(lambda x, *affine: F.group_norm(x, groups, *affine), halves)
    ours = lambda x, other, *affine: sample_norms.Normed.apply(x, other, 1e-5, groups, True, *affine)  # noqa: E731
    compared(ours, theirs, shape, halves, BF16)


@pytest.mark.parametrize("kind", ["batch", "given", "group"])
@pytest.mark.parametrize("end", [RELU, ADD, BOTH], ids=["relu", "add", "both"])
def test_inside_has_the_bits_of_outside(kind: str, end: tuple[bool, bool], kernels: Any) -> None:
    (x, other), (weight, bias), given = drawn((2, 8, 6, 5), 1, BF16)
    x.data[1, 3, 2, 2] = other.data[0, 2, 1, 1] = torch.nan
    constant = torch.full((8,), 4.0, device=DEVICE)

    def call(other: Tensor | None, relu: bool) -> Tensor:
        if kind == "batch":
            y: Tensor = batch_norm.Normed.apply(x, other, 1e-5, relu, weight, bias)
        elif kind == "given":
            y = batch_norm.NormedBy.apply(x, other, constant, constant, 1e-5, relu, weight, bias)
        else:
            y = sample_norms.Normed.apply(x, other, 1e-5, 4, relu, weight, bias)
        return y

    inside, outside = call(other if end[0] else None, end[1]), call(None, False)
    outside = outside + other if end[0] else outside
    outside = F.relu(outside, inplace=True) if end[1] else outside
    leaves = [x, weight, bias, *([other] if end[0] else [])]
    found = [(y, *torch.autograd.grad(y, leaves, given)) for y in (inside, outside)]
    assert found[0][0].isnan().any()
    for one, right in zip(*found, strict=True):
        torch.testing.assert_close(one, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_copies_of_a_batch_with_addition_and_relu(dtype: torch.dtype, kernels: Any) -> None:
    (x, other), _, _ = drawn((6, 24, 5, 5), 1, dtype)
    new = torch.randn(8 * 3 * 24 + 4, device=DEVICE)
    plain = kernels[2].scaled(x, new, 3)
    assert torch.equal(kernels[2].scaled(x, new, 3, relu=True), plain.relu())
    assert torch.equal(kernels[2].scaled(x, new, 3, other=other), plain + other)
    assert torch.equal(kernels[2].scaled(x, new, 3, relu=True, other=other), (plain + other).relu())


# What is done with a layer's output -----------------------------------------------------------------------------------

Norm = Callable[[Tensor], Tensor]


def relu_in_place(norm: Norm, x: Tensor, other: Tensor) -> Any:
    y = norm(x)
    z = F.relu(y, inplace=True)
    assert z is y or not isinstance(z, LazyNorm)
    return y, z


def residual(norm: Norm, x: Tensor, other: Tensor) -> Any:
    y = norm(x)
    y += other
    return F.relu(y, inplace=True)


def residual_apart(norm: Norm, x: Tensor, other: Tensor) -> Any:
    return F.relu(other + norm(x))


def kept_before_relu(norm: Norm, x: Tensor, other: Tensor) -> Any:
    y = norm(x)
    return torch.relu(y), y


def kept_before_addition(norm: Norm, x: Tensor, other: Tensor) -> Any:
    y = norm(x)
    return (y + other).relu_(), y


def seen_after_all(norm: Norm, x: Tensor, other: Tensor) -> Any:
    y = norm(x)
    same = [y]
    y += other
    y.relu_()
    return same[0]


def both_lazy(norm: Norm, x: Tensor, other: Tensor) -> Any:
    return torch.add(norm(x), norm(other)).relu()


def with_itself(norm: Norm, x: Tensor, other: Tensor) -> Any:
    y = norm(x)
    y += y
    return y


def with_its_input(norm: Norm, x: Tensor, other: Tensor) -> Any:
    return torch.relu_(x + norm(x))


def squeezed(norm: Norm, x: Tensor, other: Tensor) -> Any:
    y = norm(x)
    mean = y.mean((2, 3), keepdim=True)
    return F.relu(y) * mean


def written_into(norm: Norm, x: Tensor, other: Tensor) -> Any:
    y = norm(x)
    z = y.mul_(2)
    z[:, 1] = 0
    return y, z.relu_()


def written_after(norm: Norm, x: Tensor, other: Tensor) -> Any:
    y = norm(x)
    z = y.relu() * 1
    y.add_(1)
    return y, z


def after_relu(norm: Norm, x: Tensor, other: Tensor) -> Any:
    return norm(x).relu() + other


def twice(norm: Norm, x: Tensor, other: Tensor) -> Any:
    return norm(x) + other + x


def scaled_addition(norm: Norm, x: Tensor, other: Tensor) -> Any:
    return torch.add(norm(x), other, alpha=2).relu()


def broadcast(norm: Norm, x: Tensor, other: Tensor) -> Any:
    return norm(x) + other[:, :, :1, :1]


def other_layout(norm: Norm, x: Tensor, other: Tensor) -> Any:
    return norm(x) + other.contiguous()


def other_type(norm: Norm, x: Tensor, other: Tensor) -> Any:
    return norm(x) + other.float()


def a_number(norm: Norm, x: Tensor, other: Tensor) -> Any:
    return (1 + norm(x)).relu()


def into_the_other(norm: Norm, x: Tensor, other: Tensor) -> Any:
    y = other * 1
    y += norm(x)
    return y.relu_()


def without_gradient(norm: Norm, x: Tensor, other: Tensor) -> Any:
    y = norm(x)
    with torch.no_grad():
        z = y.relu()
        w = y + other
    return y, z, w


def joined(norm: Norm, x: Tensor, other: Tensor) -> Any:
    return torch.cat([norm(x), norm(other).relu()]), torch.stack((norm(x), other)).sum(0)


def copied(norm: Norm, x: Tensor, other: Tensor) -> Any:
    y = norm(x)
    return copy.deepcopy(y.detach()).relu(), y.clone(), y.relu()


def other_activation(norm: Norm, x: Tensor, other: Tensor) -> Any:
    return F.relu6(norm(x)) + F.silu(norm(other))


USES: dict[Any, list[tuple[bool, bool]]] = {
    relu_in_place: [RELU],
    residual: [BOTH],
    residual_apart: [BOTH],
    kept_before_relu: [RELU, NEITHER],
    kept_before_addition: [BOTH, NEITHER],
    seen_after_all: [BOTH],
    both_lazy: [NEITHER, BOTH],
    with_itself: [NEITHER],
    with_its_input: [BOTH],
    squeezed: [NEITHER],
    written_into: [NEITHER],
    written_after: [RELU, NEITHER],
    after_relu: [RELU],
    twice: [ADD],
    scaled_addition: [NEITHER],
    broadcast: [NEITHER],
    other_layout: [NEITHER],
    other_type: [NEITHER],
    a_number: [NEITHER],
    into_the_other: [NEITHER],
    without_gradient: [NEITHER],
    joined: [NEITHER, RELU, NEITHER],
    copied: [NEITHER],
    other_activation: [NEITHER, NEITHER],
}
"""What a kernel then computes, output by output."""


def layer(lazy: LazyNorms, kind: str, weight: Tensor, bias: Tensor) -> Norm:
    """A norm layer by kernels, as the library calls them."""

    def norm(x: Tensor) -> Tensor:
        x = computed(x)
        constant = weight.detach().abs() + 3

        def run(other: Tensor | None, relu: bool) -> Tensor:
            if kind == "batch":
                y: Tensor = batch_norm.Normed.apply(x, other, 1e-5, relu, weight, bias)
            elif kind == "given":
                y = batch_norm.NormedBy.apply(x, other, constant, constant, 1e-5, relu, weight, bias)
            else:
                y = sample_norms.Normed.apply(x, other, 1e-5, 4, relu, weight, bias)
            return y

        return lazy(run, x, weight, bias)

    return norm


def used(use: Any, kind: str, *, lazily: bool, grad: bool) -> list[Tensor]:
    """All that the use returns, and gradients."""
    lazy = LazyNorms(nn.Identity())
    lazy.right = lazily
    (x, other), (weight, bias), _ = drawn((2, 8, 4, 5), 1, BF16)
    with torch.set_grad_enabled(grad), lazy.passing():
        said = use(layer(lazy, kind, weight, bias), x * 1, other * 1)
        found: list[Tensor] = [computed(each) for each in (said if isinstance(said, tuple) else (said,))]
    if grad:
        learnt = [each.float().square().sum() for each in found if each.requires_grad]
        found += torch.autograd.grad(sum(learnt), [x, other, weight, bias], materialize_grads=True)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("kind", ["batch", "given", "group"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("use", list(USES), ids=[each.__name__ for each in USES])
def test_every_use_of_an_output_gives_what_torch_gives(
    use: Any, kind: str, grad: bool, ends: list[tuple[bool, bool]]
) -> None:
    mine = used(use, kind, lazily=True, grad=grad)
    if use is not without_gradient or grad:
        assert ends == USES[use]
    theirs = used(use, kind, lazily=False, grad=grad)
    for one, other in zip(mine, theirs, strict=True):
        assert (type(one), one.shape, one.stride(), one.dtype) == (Tensor, other.shape, other.stride(), other.dtype)
        assert one.requires_grad == other.requires_grad
        # Where an output is used before and after ReLU, its two gradients are rounded before they are added.
        close = 0 if len(ends) == 2 * ends.count(NEITHER) or len(USES[use]) == 1 else 2e-2
        torch.testing.assert_close(one, other, rtol=close, atol=close * float(other.detach().abs().max()))


def test_questions_about_its_form_do_not_compute_it(ends: list[tuple[bool, bool]]) -> None:
    lazy = LazyNorms(nn.Identity())
    lazy.right = True
    (x, _), (weight, bias), _ = drawn((2, 8, 4, 5), 1, BF16)
    with lazy.passing():
        y = layer(lazy, "batch", weight, bias)(x.detach())
        assert isinstance(y, Tensor)
        assert (y.shape, y.size(1), y.dim(), y.ndim, len(y), y.numel()) == (x.shape, 8, 4, 4, 2, 320)
        assert (y.dtype, y.device, y.layout, y.is_cuda) == (BF16, x.device, torch.strided, x.is_cuda)
        assert y.is_contiguous(memory_format=LAST)
        assert not y.is_contiguous()
        assert y.stride() == x.stride()
        assert y.is_floating_point()
        assert y.requires_grad
        with torch.no_grad():
            z = layer(lazy, "batch", weight, bias)(x.detach())
            assert not z.requires_grad
        assert not ends
        assert y.grad_fn is not None
        assert ends == [NEITHER]
    assert len(ends) == 2, "what is pending when a pass ends is computed"


@pytest.mark.parametrize("which", [0, 1], ids=["input", "added"])
def test_what_a_layer_reads_may_not_be_written_before_it_is_read(which: int, ends: list[tuple[bool, bool]]) -> None:
    lazy = LazyNorms(nn.Identity())
    lazy.right = True
    images, affine, _ = drawn((2, 8, 4, 5), 1, BF16)
    with torch.no_grad(), lazy.passing():
        y = layer(lazy, "batch", *affine)(images[0])
        y += images[1]
        images[which].relu_()
        with pytest.raises(RuntimeError, match="wrote in place"):
            y.sum()
        del y
    assert not ends
    assert lazy.right is False, "from now on nothing is lazy"


# Whole networks -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """As torchvision has it: one ReLU for three places."""

    def __init__(self, wide: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, wide, 3, padding=1, bias=False), norm(wide)
        self.conv2, self.bn2 = nn.Conv2d(wide, wide, 1, bias=False), norm(wide)
        self.relu: nn.Module = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        out += identity
        return self.relu(out)


def net(norm: Callable[[int], nn.Module] = nn.BatchNorm2d, body: Callable[..., nn.Module] = Block) -> nn.Module:
    """A few blocks between a stem and a head."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm(8), nn.ReLU(inplace=True))
    layers = [stem, *(body(8, norm) for _ in range(2)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
    return shaken(nn.Sequential(*layers))


def shaken(made: nn.Module) -> nn.Module:
    """A network in eval mode whose norm layers have numbers of their own."""
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
            nn.init.uniform_(module.weight, 0.7, 1.3)
            nn.init.uniform_(module.bias, -0.2, 0.2)
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            assert module.running_var is not None
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.6, 1.4)
    return made.eval().to(DEVICE)


def groups(wide: int) -> nn.Module:
    return nn.GroupNorm(4, wide)


def batches() -> list[Tensor]:
    """Two of them, small: an interpreter reads them."""
    return [batch[..., ::2, ::2].contiguous() for batch in stream(DEVICE, 2, size=4)]


def adapted(model: nn.Module, method: str = "tent", **settings: Any) -> poem.Adapter:
    """An adapter in half precision, which learns from every sample."""
    learns = {} if method in ("source", "bn", "auto") else {"select": Everyone(), "lr": 0.02}
    if method == "poem":
        learns |= {"rounds": 1, "split": "2"}
    if method == "auto":
        learns = {"guard": False}
    given: dict[str, Any] = {"precision": "bf16", "fast": False, **learns, **settings}
    adapter: poem.Adapter = poem.adapt(model, method, **given)
    return adapter


def lazy_of(adapter: poem.Adapter) -> LazyNorms:
    found: LazyNorms = network(adapter).acceleration.lazy  # type: ignore[attr-defined]
    return found


def answers(adapter: poem.Adapter) -> list[Tensor]:
    """To two batches, and then what has moved."""
    found = [adapter(batch) for batch in batches()]
    return [*found, *moving(adapter).values()]


def plainly(adapter: poem.Adapter) -> poem.Adapter:
    """The adapter, in which nothing is lazy."""
    lazy_of(adapter).right = False
    return adapter


def same(model: nn.Module, method: str = "tent", **settings: Any) -> poem.Adapter:
    """An adapter that answered and learnt, lazily, as one in which nothing is lazy."""
    adapter = adapted(model, method, **settings)
    mine = answers(adapter)
    theirs = answers(plainly(adapted(model, method, **settings)))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    return adapter


@pytest.mark.parametrize("method", ["source", "bn", "tent", "poem", "auto"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, groups], ids=["batch norm", "group norm"])
def test_an_adapter_is_the_same_with_lazy_norm_layers(
    norm: Callable[[int], nn.Module], method: str, ends: list[tuple[bool, bool]]
) -> None:
    adapter = same(net(norm), method)
    assert lazy_of(adapter).right
    assert RELU in ends
    assert BOTH in ends
    assert not adapter.last.notes
    if method == "poem":
        assert doubles(adapter)
        assert branch_backward(adapter).right


def forward_ends(adapter: poem.Adapter, batch: Tensor, ends: list[tuple[bool, bool]]) -> list[tuple[bool, bool]]:
    """Of one forward pass after the first batch."""
    adapter(batch)
    ends.clear()
    adapter(batch)
    return list(ends)


def test_all_of_a_resnet_18_is_inside(ends: list[tuple[bool, bool]]) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = shaken(models.resnet18(num_classes=10))
    seen: list[str] = []
    adapter = adapted(model, "bn")
    batch = torch.rand(2, 3, 32, 32, device=DEVICE)
    found = forward_ends(adapter, batch, ends)
    plain, down = [RELU, BOTH], [RELU, NEITHER, BOTH]
    assert found == [RELU, *plain, *plain, *(down + plain) * 3], "of a block with a shortcut its norm runs alone"

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            lazy = any(isinstance(each, LazyNorm) for each in args)
            if not lazy and getattr(func, "__name__", "") in ("relu", "relu_", "add_"):
                seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Counting():
        adapter(batch)
    assert not seen, "torch itself adds and clips nothing"


def bottlenecks() -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    made: nn.Module = ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10)
    return made


def timm_resnet() -> nn.Module:
    timm = pytest.importorskip("timm")
    made: nn.Module = timm.create_model("resnet10t", num_classes=10)
    return made


def densenet() -> nn.Module:
    from torchvision.models import DenseNet

    made: nn.Module = DenseNet(8, (2, 2), 8, num_classes=10)
    return made


def timm_small() -> nn.Module:
    timm = pytest.importorskip("timm")
    made: nn.Module = timm.create_model("test_resnet", num_classes=10)
    return made


@pytest.mark.parametrize(
    ("make", "residual"),
    [(bottlenecks, True), (timm_resnet, True), (densenet, False), (timm_small, True)],
    ids=["torchvision's bottlenecks", "timm's ResNet", "DenseNet", "timm's test network"],
)
def test_networks_as_libraries_have_them(
    make: Callable[[], nn.Module], residual: bool, ends: list[tuple[bool, bool]]
) -> None:
    pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model, batch = shaken(make()), torch.rand(2, 3, 32, 32, device=DEVICE)
    ours = adapted(model)
    mine = [ours(batch), *moving(ours).values()]
    theirs = plainly(adapted(model))
    # On a GPU torch promises no order in which convolutions and max pooling add up gradients. Of the thousands of
    # numbers that move, each about one, single ones then differ in their last bit, which is 1e-7.
    close = 0 if DEVICE == "cpu" else 1e-6
    for one, other in zip(mine, [theirs(batch), *moving(theirs).values()], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=close)
    assert lazy_of(ours).right
    assert RELU in ends
    assert (BOTH in ends) == residual


class PreActivation(Block):
    """A skip that is taken before the norm, and one after it."""

    def forward(self, x: Tensor) -> Any:
        out = self.relu(self.bn1(x))
        shortcut = self.conv2(out)
        return self.conv1(out) + shortcut + x


class SqueezeExcite(Block):
    """A mean before ReLU."""

    def forward(self, x: Tensor) -> Any:
        x = self.bn1(self.conv1(x))
        gate = x.mean((2, 3), keepdim=True).sigmoid()
        return self.relu(x) * gate


class Keeps(Block):
    """An attribute that outlives the pass."""

    def forward(self, x: Tensor) -> Any:
        self.kept = self.bn1(self.conv1(x))
        return F.relu(self.kept) + x


class OtherActivation(Block):
    def forward(self, x: Tensor) -> Any:
        return F.silu(self.bn1(self.conv1(x)), inplace=True) + self.bn2(x)


@pytest.mark.parametrize("body", [PreActivation, SqueezeExcite, Keeps, OtherActivation])
def test_bodies_that_do_other_things(body: type[Block], ends: list[tuple[bool, bool]]) -> None:
    adapter = same(net(body=body))
    assert lazy_of(adapter).right
    assert RELU in ends, "the stem's"
    kept = getattr(network(adapter).twin.root[1], "kept", None)  # type: ignore[index]
    assert kept is None or kept._todo is None, "nothing is pending after a pass"


class WritesInput(Block):
    """In a pass without gradient torch allows it."""

    def forward(self, x: Tensor) -> Any:
        x = self.conv1(x)
        y = self.bn1(x)
        x.relu_()
        return y + x


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class OwnFunction(Block):
    """A function that torch hands no lazy tensor's gradient to."""

    def forward(self, x: Tensor) -> Any:
        return x + Doubling.apply(self.bn1(self.conv1(x)))


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


class ScriptedFunction(Block):
    def forward(self, x: Tensor) -> Any:
        return x + scripted(self.bn1(self.conv1(x)))


@pytest.mark.parametrize(
    ("body", "method", "why"),
    [
        (WritesInput, "bn", "wrote in place"),
        (WritesInput, "auto", "wrote in place"),
        (OwnFunction, "tent", "the answers differ"),
        (ScriptedFunction, "bn", "TorchScript"),
    ],
    ids=["writes", "writes, in copies", "a function of its own", "a scripted function"],
)
def test_a_model_that_fails_the_trial_is_never_lazy(
    body: type[Block], method: str, why: str, ends: list[tuple[bool, bool]]
) -> None:
    model = net(body=body)
    adapter = adapted(model, method)
    mine = [adapter(batches()[0])]
    assert len(adapter.last.notes) == 1
    assert why in adapter.last.notes[0]
    ends.clear()
    mine += [adapter(batches()[1]), *moving(adapter).values()]
    assert not adapter.last.notes, "said once"
    assert set(ends) == {NEITHER}
    for one, other in zip(mine, answers(plainly(adapted(model, method))), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


HOOKS: dict[str, Callable[[Any, list[Tensor]], Any]] = {
    "forward": lambda layer, seen: layer.register_forward_hook(lambda m, a, out: seen.append(out.clone())),
    "pre": lambda layer, seen: layer.register_forward_pre_hook(lambda m, args: seen.append(args[0].clone())),
    "backward": lambda layer, seen: layer.register_full_backward_hook(lambda m, i, out: seen.append(out[0].clone())),
    "backward pre": lambda layer, seen: layer.register_full_backward_pre_hook(
        lambda m, out: seen.append(out[0].clone())
    ),
}


@pytest.mark.parametrize("hook", list(HOOKS))
def test_hooks_see_what_they_would(hook: str, ends: list[tuple[bool, bool]]) -> None:
    seen: list[list[Tensor]] = []
    for lazily in (True, False):
        model: Any = net()
        model[1].relu.inplace = False
        seen.append([])
        HOOKS[hook](model[1].relu, seen[-1])
        adapter = adapted(model)
        answers(adapter if lazily else plainly(adapter))
    assert seen[0]
    for one, other in zip(*seen, strict=True):
        assert type(one) is Tensor
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert set(ends) == {NEITHER}


def test_hooks_that_come_and_go(ends: list[tuple[bool, bool]]) -> None:
    model, batch = net(), batches()[0]
    adapter = adapted(model, "bn")
    assert BOTH in forward_ends(adapter, batch, ends)
    for register in (model[1].register_forward_hook, register_module_forward_hook):  # type: ignore[index]
        handle = register(lambda *_: None)
        try:
            assert set(forward_ends(adapter, batch, ends)) == {NEITHER}
        finally:
            handle.remove()
        assert BOTH in forward_ends(adapter, batch, ends)


def test_a_changed_model_is_tried_again(ends: list[tuple[bool, bool]]) -> None:
    model: Any = net()
    adapter = adapted(model, "bn")
    answers(adapter)
    model[1].forward = WritesInput.forward.__get__(model[1])
    adapter(batches()[0])
    assert "wrote in place" in adapter.last.notes[0]
    assert lazy_of(adapter).right is False


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
    ],
    ids=["source", "mixed", "the user's own"],
)
def test_statistics_that_are_given(settings: dict[str, Any], inside: bool, ends: list[tuple[bool, bool]]) -> None:
    same(net(), **settings)
    assert (BOTH in ends) == (RELU in ends) == inside


def test_a_row_per_sample_is_scaled_apart(kernels: Any) -> None:
    same(net(), statistics=Source(), step=Clipped(SGD()))


def test_a_copy_of_an_adapter_answers_alike(ends: list[tuple[bool, bool]]) -> None:
    adapter = adapted(net())
    adapter(batches()[0])
    twin = copy.deepcopy(adapter)
    assert torch.equal(twin(batches()[1]), adapter(batches()[1]))
    assert lazy_of(twin).right


def test_without_triton_all_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batch_norm, sample_norms, blended):
        monkeypatch.setattr(module, "DEVICES", ("cuda", "cpu"))
        monkeypatch.setattr(module.TRITON, "_modules", None)
        monkeypatch.setattr(module.TRITON, "_imports", False)
        monkeypatch.setattr(module.TRITON, "_works", {})
    monkeypatch.setattr(LazyNorms, "__call__", lambda *_: pytest.fail("a layer that kernels take"))
    for norm in (nn.BatchNorm2d, groups):
        for method in ("source", "tent"):
            assert all(each.isfinite().all() for each in answers(adapted(net(norm), method)))


def test_full_precision_is_never_lazy(kernels: Any) -> None:
    assert network(adapted(net(), precision="fp32")).acceleration.lazy is None  # type: ignore[attr-defined]


class InOperations:
    """Batch norm's kernels in operations of torch, which a tape can note."""

    def __init__(self) -> None:
        self.ends: list[tuple[bool, bool]] = []

    @staticmethod
    def _shaped(numbers: Any) -> Tensor:
        return torch.stack(tuple(numbers))[:, None, :, None, None].float()

    def normed(self, x: Tensor, affine: Any, eps: float, *, relu: bool, other: Tensor | None) -> Any:
        self.ends.append((other is not None, relu))
        halves = x.float().unflatten(0, (len(affine), -1))
        mean, rstd = halves.mean((1, 3, 4)), (halves.var((1, 3, 4), correction=0) + eps).rsqrt()
        scale, shift = map(self._shaped, zip(*affine, strict=True))
        y = (halves - self._shaped(list(mean))) * self._shaped(list(rstd)) * scale + shift
        y = y.flatten(0, 1).to(x.dtype)
        y = y if other is None else y + other
        return (y.relu() if relu else y).contiguous(memory_format=LAST), mean, rstd

    def backward(self, dy: Tensor, x: Tensor, affine: Any, mean: Tensor, rstd: Tensor, *, relu: bool) -> Any:
        halves, dy = (each.float().unflatten(0, (len(affine), -1)) for each in (x, dy))
        scale, shift = map(self._shaped, zip(*affine, strict=True))
        normal = (halves - self._shaped(list(mean))) * self._shaped(list(rstd))
        dy = torch.where(normal * scale + shift > 0, dy, 0) if relu else dy
        total, along = dy.sum((1, 3, 4)), (dy * normal).sum((1, 3, 4))
        count = halves[0, :, 0].numel()
        dx = dy - self._shaped(list(total)) / count - normal * self._shaped(list(along)) / count
        dx = (dx * self._shaped(list(rstd)) * scale).flatten(0, 1).to(x.dtype)
        return dx.contiguous(memory_format=LAST), along, total


@pytest.mark.parametrize("method", ["bn", "tent", "poem"])
def test_a_captured_loop_is_lazy_too(method: str, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = InOperations()
    monkeypatch.setattr(batch_norm, "kernels", lambda: operations)
    model = net()
    with capturing(DEVICE):
        eager, captured = (adapted(model, method, fast=fast) for fast in (False, True))
        during = []
        for batch in [*batches(), *batches()]:
            operations.ends.clear()
            mine = captured(batch)
            during.append(set(operations.ends))
            torch.testing.assert_close(mine, eager(batch), atol=0 if DEVICE == "cpu" else 2e-2, rtol=0)
    assert captured_sizes(captured) == [4]
    assert not captured.last.notes
    assert BOTH in during[1], "as it was captured"
    assert not during[-1], "a replay calls nothing"


def test_nothing_leaves_a_pass_lazy(kernels: Any) -> None:
    class Answer(nn.Module):
        """Its logits are what a norm layer returned."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.bn(self.conv(x))[:, :, 0, 0]
            return found

    adapter = adapted(shaken(Answer()), "tent")
    assert all(type(each) is Tensor for each in answers(adapter))
    assert lazy_of(adapter).right
    assert not lazy_of(adapter).pending
