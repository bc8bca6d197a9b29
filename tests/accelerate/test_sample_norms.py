"""Group norm and layer norm by kernels of our own are group norm and layer norm.

Without a GPU the kernels run in Triton's interpreter (see conftest.py): the same code, number by number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from inside import branch_backward, cached_layers, captured_sizes, doubles, moving, network
from interpreted import triton_or_skip
from nets import make_net
from torch import Tensor, nn
from torch.nn import functional as F
from toys import stream

import poem
from poem.accelerate import sample_norms
from poem.parts import Everyone, Parameters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAST = torch.channels_last
BF16 = torch.bfloat16


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels of group norm and of layer norm, which the library takes on whatever device there is."""
    triton_or_skip(monkeypatch)
    monkeypatch.setattr(sample_norms, "DEVICES", ("cuda", "cpu"))
    return sample_norms.kernels()


@pytest.fixture
def counted(fused: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each of them was called."""
    calls = {"group": 0, "group backward": 0, "layer": 0, "layer backward": 0}
    sample_norms.TRITON.work(torch.empty(0, device=DEVICE).device)  # tried before we count

    def counting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            calls[name] += 1
            return function(*args, **named)

        return call

    for kernels, kind in zip(fused, ("group", "layer"), strict=True):
        monkeypatch.setattr(kernels, "normed", counting(kernels.normed, kind))
        monkeypatch.setattr(kernels, "backward", counting(kernels.backward, f"{kind} backward"))
    return calls


def compared(x: Tensor, groups: int | None, halves: int, given: Tensor, eps: float = 1e-5) -> None:
    """Our output and gradients against those of torch in double precision, each half by itself."""
    channels = x.shape[-1 if groups is None else 1]
    rng = torch.Generator().manual_seed(1)
    affine = [torch.randn(channels, generator=rng).to(DEVICE).requires_grad_() for _ in range(2 * halves)]
    exact, twins = x.detach().double().requires_grad_(), [each.detach().double().requires_grad_() for each in affine]
    theirs = []
    for half, weight, bias in zip(exact.chunk(halves), twins[::2], twins[1::2], strict=True):
        plain = F.layer_norm(half, (channels,), weight, bias, eps) if groups is None else None
        theirs.append(F.group_norm(half, groups, weight, bias, eps) if plain is None and groups else plain)
    whole = torch.cat([each for each in theirs if each is not None])
    ours = sample_norms.Normed.apply(x, None, eps, groups, False, *affine)
    mine = torch.autograd.grad(ours, [x, *affine], given, retain_graph=True)
    without_input = torch.autograd.grad(ours, affine, given, retain_graph=True)
    (without_affine,) = torch.autograd.grad(ours, [x], given)
    wanted = torch.autograd.grad(whole, [exact, *twins], given.double())
    assert ours.dtype == BF16
    assert not ours._is_view(), "layers after it may write in place"
    assert mine[0].dtype == x.dtype
    pairs = [
        (ours, whole),
        *zip((*mine, *without_input, without_affine), (*wanted, *wanted[1:], wanted[0]), strict=True),
    ]
    for one, other in pairs:
        assert one.shape == other.shape
        far = (one.double() - other).abs().max() / (1 + other.abs().max())
        assert far < (1e-5 if one.dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("workers", [528, 1], ids=["stretches", "one program per sample"])
@pytest.mark.parametrize(
    ("shape", "groups", "halves"),
    [
        ((4, 24, 9, 9), 6, 2),
        ((2, 70, 12, 11), 7, 1),
        ((4, 64, 8, 8), 32, 2),
        ((2, 64, 14, 14), 32, 1),
        ((3, 8, 1, 1), 2, 1),
        ((2, 5, 3, 4), 5, 2),
        ((2, 320, 3, 3), 32, 2),
        ((2, 130, 4, 4), 1, 1),
    ],
)
def test_the_kernels_are_group_norm_there_and_back(
    shape: tuple[int, ...], groups: int, halves: int, workers: int, fused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused[0], "WORKERS", workers)
    monkeypatch.setattr(fused[0], "LEAST", 32)
    parts = fused[0].plan(shape[0], shape[2] * shape[3], shape[1], shape[1] // groups)[1]
    assert (parts > 1) == (workers > 1 and shape[2] * shape[3] > 64)
    rng = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(shape, generator=rng) + 20  # far from zero: sums of squares must not lose the variance
    x = x.to(DEVICE, BF16).contiguous(memory_format=LAST).requires_grad_()
    given = torch.randn(shape, generator=rng).to(DEVICE, BF16)  # not channels last: a later layer may be so
    compared(x, groups, halves, given)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("shape", "halves"), [((4, 7, 24), 2), ((3, 70), 1), ((2, 3, 3, 33), 2), ((2, 5, 1025), 1), ((6, 11, 17), 2)]
)
def test_the_kernels_are_layer_norm_there_and_back(
    shape: tuple[int, ...], halves: int, transposed: bool, dtype: torch.dtype, fused: Any
) -> None:
    rng = torch.Generator().manual_seed(0)
    x, given = (3 * torch.randn(shape, generator=rng) + 20).to(DEVICE, dtype), torch.randn(shape, generator=rng)
    given = given.to(DEVICE, BF16)
    if transposed:  # places before samples in memory, as in attention
        x, given = (each.transpose(0, -2).contiguous().transpose(0, -2) for each in (x, given))
    if sample_norms.rows_of(x) is None:
        assert x.dim() == 4, "places that cannot be seen as one dimension"
        return
    compared(x.requires_grad_(), None, halves, given)


def test_what_is_not_asked_for_is_not_computed(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []
    own = fused[0].backward

    def backward(*args: Any, relu: bool, input_grad: bool, affine_grad: bool) -> Any:
        asked.append((input_grad, affine_grad))
        dx, scale, shift = own(*args, relu=relu, input_grad=input_grad, affine_grad=affine_grad)
        assert (dx is not None, scale is not None, shift is not None) == (input_grad, affine_grad, affine_grad)
        return dx, scale, shift

    monkeypatch.setattr(fused[0], "backward", backward)
    x = torch.rand(2, 8, 4, 4, device=DEVICE, dtype=BF16).contiguous(memory_format=LAST)
    one = torch.ones(8, device=DEVICE)
    sample_norms.Normed.apply(x, None, 1e-5, 2, False, one.clone().requires_grad_(), one).sum().backward()
    sample_norms.Normed.apply(x.requires_grad_(), None, 1e-5, 2, False, one, one).sum().backward()
    assert asked == [(False, True), (True, False)]


def test_a_number_that_is_not_finite_spoils_its_group_alone(fused: Any) -> None:
    x = torch.rand(2, 8, 4, 4, device=DEVICE).to(BF16).contiguous(memory_format=LAST)
    x[1, 3, 2, 2] = torch.inf
    one = torch.ones(8, device=DEVICE)
    y = fused[0].normed(x, [(one, one)], 1e-5, 4)[0]
    assert y[1, 2:4].isnan().all()
    assert y[0].isfinite().all()
    assert y[1, [0, 1, 4, 5, 6, 7]].isfinite().all()


def test_there_is_no_second_backward_pass(fused: Any) -> None:
    x = torch.rand(2, 8, 4, 4, device=DEVICE, dtype=BF16).contiguous(memory_format=LAST).requires_grad_()
    one = torch.ones(8, device=DEVICE)
    y = sample_norms.Normed.apply(x, None, 1e-5, 2, False, one, one)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


class LoudGroups(nn.GroupNorm):
    """A layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_which_inputs_the_kernels_take(fused: Any) -> None:
    layer = nn.GroupNorm(2, 4).to(DEVICE)
    x = torch.rand(2, 4, 3, 3, device=DEVICE, dtype=BF16).contiguous(memory_format=LAST)
    takes = sample_norms.fusable
    assert takes(layer, x, 1)
    assert takes(layer, x, 2)
    assert not takes(layer, x[:1], 2), "one sample has no halves"
    assert not takes(layer, x.float(), 1)
    assert not takes(layer, x.contiguous(), 1), "channels first"
    assert not takes(layer, x[:, :, ::2], 1)
    assert not takes(layer, x.flatten(2), 1)
    assert not takes(nn.GroupNorm(2, 4, affine=False), x, 1)
    assert not takes(LoudGroups(2, 4), x, 1)
    assert not takes(nn.GroupNorm(1, 520), torch.rand(1, 520, 2, 2, dtype=BF16).to(DEVICE, memory_format=LAST), 1)
    rows, norm = torch.rand(2, 3, 8, device=DEVICE, dtype=BF16), nn.LayerNorm(8).to(DEVICE)
    assert takes(norm, rows, 2)
    assert takes(norm, rows.transpose(0, 1), 1)
    assert not takes(norm, torch.rand(2, 3, 16, device=DEVICE, dtype=BF16)[..., ::2], 1)
    assert not takes(norm, rows.float(), 1), "full precision"
    with torch.autocast(DEVICE, dtype=BF16):
        assert takes(norm, rows.float(), 1), "the linear layer that follows would cast it"
    assert not takes(nn.LayerNorm((3, 8)).to(DEVICE), rows, 1)
    assert not takes(nn.LayerNorm(8, bias=False).to(DEVICE), rows, 1)
    assert not takes(nn.RMSNorm(8).to(DEVICE), rows, 1)


def adapted(kind: str, method: str = "poem", **settings: Any) -> poem.Adapter:
    """An adapter of a small network, which learns from every sample."""
    given: dict[str, Any] = {"precision": "bf16", "select": Everyone(), "fast": False, "lr": 0.02, **settings}
    if method == "poem":
        given.setdefault("rounds", 1)
    adapter: poem.Adapter = poem.adapt(make_net(kind, sharpness=10.0).to(DEVICE), method, **given)
    return adapter


@pytest.mark.parametrize("kind", ["gn", "ln"])
def test_an_adapter_on_kernels_is_as_near_to_full_precision(
    kind: str, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, layers, ours = (adapted(kind, precision=precision) for precision in ("fp32", "bf16", "bf16"))
    far = torch.zeros(2)
    for batch in stream(DEVICE, 2, size=4):
        wanted, mine = exact(batch), ours(batch)
        with monkeypatch.context() as patch:
            patch.setattr(sample_norms, "DEVICES", ())
            theirs = layers(batch)
        far += torch.stack([(answer - wanted).norm().cpu() for answer in (mine, theirs)])
    assert 0 < far[0] < 3 * far[1]
    own = "group" if kind == "gn" else "layer"
    assert counted[own] > counted[f"{own} backward"] > 0
    moved = [torch.cat([each.flatten() for each in moving(adapter).values()]) for adapter in (exact, layers, ours)]
    assert (moved[2] - moved[0]).norm() < 3 * (moved[1] - moved[0]).norm()
    assert doubles(ours), "both halves at once"
    assert branch_backward(ours).right, "the branch's loss through its own half"


@pytest.mark.parametrize("method", ["source", "tent", "poem"])
@pytest.mark.parametrize("kind", ["gn", "ln"])
def test_every_layer_of_every_pass_is_ours(
    kind: str, method: str, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # So the network stays channels last throughout: else a group norm would have been left to torch.
    net = make_net(kind).to(DEVICE)
    learns = method != "source"
    adapter = adapted(kind, method) if learns else poem.adapt(net, method, precision="bf16", fast=False)
    seen: list[str] = []
    for name in ("group_norm", "layer_norm"):
        monkeypatch.setattr(F, name, lambda *_, name=name: seen.append(name))
    assert adapter(stream(DEVICE, 1, size=4)[0]).isfinite().all()
    assert seen == []
    assert counted["group" if kind == "gn" else "layer"] > 0


def test_full_precision_keeps_the_layers(counted: dict[str, int]) -> None:
    for kind in ("gn", "ln"):
        with torch.autocast(DEVICE, dtype=BF16):
            adapted(kind, precision="fp32")(stream(DEVICE, 1)[0])
    assert not any(counted.values())


def test_a_forward_put_into_the_class_is_kept(counted: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.GroupNorm.forward
    monkeypatch.setattr(nn.GroupNorm, "forward", lambda self, x: 2 * plain(self, x))
    for method in ("tent", "poem"):
        adapted("gn", method)(stream(DEVICE, 1)[0])
    assert not any(counted.values())


def test_a_layer_with_a_forward_of_its_own_keeps_it(counted: dict[str, int]) -> None:
    for norm in (LoudGroups, nn.GroupNorm):
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3), norm(2, 8), nn.Conv2d(8, 8, 3), norm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 4),
        ).to(DEVICE).to(memory_format=LAST)  # fmt: skip
        images = torch.rand(4, 3, 8, 8, device=DEVICE).contiguous(memory_format=LAST)
        poem.adapt(net, "tent", precision="bf16")(images)
        assert any(counted.values()) == (norm is nn.GroupNorm), "torch's own is taken, so this input would be"


def test_layers_of_timm_are_known(fused: Any) -> None:
    norm = pytest.importorskip("timm.layers.norm")
    rows = torch.rand(2, 3, 8, device=DEVICE, dtype=BF16)
    layer = norm.LayerNorm(8).to(DEVICE)
    mine = sample_norms.fused(layer, layer.forward, rows, [(layer.weight, layer.bias)])
    assert mine is not None
    torch.testing.assert_close(mine, layer(rows.float()).to(BF16), atol=0.02, rtol=0.02)
    x = torch.rand(2, 8, 3, 3, device=DEVICE, dtype=BF16).contiguous(memory_format=LAST)
    assert sample_norms.fusable(norm.GroupNorm(8, 2).to(DEVICE), x, 1)
    over = norm.LayerNorm2d(8).to(DEVICE)
    assert not sample_norms.fusable(over, x.contiguous(), 1), "channels first"
    assert not sample_norms.fusable(over, rows, 1)
    found = sample_norms.fused(over, over.forward, x, [(over.weight, over.bias)])
    assert found is not None
    assert found.is_contiguous(memory_format=LAST)
    torch.testing.assert_close(found, over(x.float()).to(BF16), atol=0.02, rtol=0.02)
    acting = pytest.importorskip("timm.layers.norm_act").GroupNormAct(8, 2).to(DEVICE)
    active = sample_norms.fused(acting, acting.forward, x.requires_grad_(), [(acting.weight, acting.bias)])
    assert active is not None
    torch.testing.assert_close(active, acting(x.float()).to(BF16), atol=0.02, rtol=0.02)
    assert (active == 0).any(), "its activation ran"
    active.sum().backward()


def test_where_the_kernels_do_not_run_torch_has_its_own(
    fused: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_: Any, **named: Any) -> None:
        raise RuntimeError("no C compiler found")

    monkeypatch.setattr(fused[0], "normed", no_compiler)
    monkeypatch.setattr(sample_norms.TRITON, "_works", {})
    for kind in ("gn", "ln"):
        assert adapted(kind, "tent")(stream(DEVICE, 1)[0]).isfinite().all()
    assert len([record for record in caplog.records if "no C compiler found" in record.message]) == 1


class Layer4(Parameters):
    """The norm layers of the last stage only."""

    def __call__(self, model: nn.Module, anatomy: Any) -> list[str]:
        return [name for name, _ in model.named_parameters() if name.startswith("layer4") and "norm" in name]


def test_a_norm_layer_below_all_that_moves_is_cached(counted: dict[str, int]) -> None:
    adapter = adapted("gn", "tent", parameters=Layer4())
    adapter(stream(DEVICE, 1, size=4)[0])
    assert "norm1" in cached_layers(adapter)
    patched: Any = network(adapter).twin.root
    assert not isinstance(patched.norm1.__dict__["forward"], sample_norms.FusedForward), "the cache is in front of it"
    assert counted["group"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["tent", "poem"])
@pytest.mark.parametrize("kind", ["gn", "ln"])
def test_a_captured_loop_is_the_eager_one(kind: str, method: str, counted: dict[str, int]) -> None:
    eager, captured = (adapted(kind, method, fast=fast) for fast in (False, True))
    for batch in stream(DEVICE, 5):
        torch.testing.assert_close(captured(batch), eager(batch), atol=2e-2, rtol=0)
    assert captured_sizes(captured) == [8]
    assert counted["group" if kind == "gn" else "layer"] > 0


def test_the_same_numbers_give_the_same_gradients(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused[0], "LEAST", 32)
    x = torch.rand(4, 8, 9, 9, device=DEVICE, dtype=BF16).contiguous(memory_format=LAST)
    one = torch.ones(8, device=DEVICE)
    y, *moments = fused[0].normed(x, [(one, one)], 1e-5, 4)
    first, second = (fused[0].backward(y, x, [(one, one), (2 * one, one)], *moments) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert first[1].shape == (2, 8)
    assert not torch.equal(*first[1]), "each half has gradients of its own"
