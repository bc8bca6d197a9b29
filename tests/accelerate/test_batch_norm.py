"""Batch norm by kernels of our own is batch norm.

Without a GPU the kernels run in Triton's interpreter (see conftest.py): the same code, number by number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from inside import branch_backward, doubles, moving, network
from interpreted import triton_or_skip
from nets import make_net
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from toys import stream

import poem
from poem.accelerate import batch_norm as _fused
from poem.accelerate.prefix_cache import PrefixCache
from poem.parts import Everyone, FromBatch, Source

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAST = torch.channels_last


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels, which the library takes on whatever device there is."""
    triton_or_skip(monkeypatch)
    monkeypatch.setattr(_fused, "DEVICES", ("cuda", "cpu"))
    return _fused.kernels()


def plainly(x: Tensor, affine: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Each group by itself."""
    halves = zip(x.chunk(len(affine)), affine, strict=True)
    return torch.cat([F.batch_norm(half, None, None, *pair, training=True) for half, pair in halves])


@pytest.mark.parametrize("small", [0, 1024])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((4, 24, 9, 9), 2), ((2, 70, 12, 11), 1), ((4, 64, 16, 16), 1), ((4, 64, 16, 16), 2), ((2, 8, 1, 1), 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_are_batch_norm_there_and_back(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, small: int, fused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "SMALL", small)
    rng = torch.Generator().manual_seed(0)
    drawn = 3 * torch.randn(shape, generator=rng) + 20  # far from zero: sums of squares must not lose the variance
    x = drawn.to(DEVICE, dtype).contiguous(memory_format=LAST).requires_grad_()
    affine = [tuple(torch.randn(2, shape[1], generator=rng).to(DEVICE).requires_grad_()) for _ in range(groups)]
    flat = [tensor for pair in affine for tensor in pair]
    given = torch.randn(shape, generator=rng).to(DEVICE, dtype)  # not channels last: a later layer may be so
    exact = x.detach().double().requires_grad_()
    twins = [tensor.detach().double().requires_grad_() for tensor in flat]
    ours = _fused.Normed.apply(x, None, 1e-5, False, *flat)
    theirs = plainly(exact, list(zip(twins[::2], twins[1::2], strict=True)))
    mine = torch.autograd.grad(ours, [x, *flat], given)
    wanted = torch.autograd.grad(theirs, [exact, *twins], given.double())
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for one, other in zip((ours, *mine), (theirs, *wanted), strict=True):
        assert one.dtype == (dtype if one.dim() == 4 else torch.float32)
        far = (one.double() - other).abs().max() / (1 + other.abs().max())
        assert far < tolerance


class Counted:
    """Kernels that are counted."""

    def __init__(self, kernels: Any) -> None:
        names = ("normed", "backward", "normed_by", "backward_by", "moments", "sums")
        self.kernels, self.calls = kernels, dict.fromkeys(names, 0)
        self.SMALL = kernels.SMALL

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.kernels, name)


@pytest.fixture
def counted(fused: Any, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """The same, with a counter."""
    _fused.TRITON.work(torch.empty(0, device=DEVICE).device)  # tried before we count
    counter = Counted(fused)
    monkeypatch.setattr(_fused, "kernels", lambda: counter)
    return counter


def test_an_adapter_on_kernels_is_as_near_to_full_precision(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, layers, ours = (
        poem.adapt(make_net("bn", sharpness=10.0).to(DEVICE), "poem", lr=0.02, fast=False, select=Everyone(), rounds=1,
                   precision=precision)
        for precision in ("fp32", "bf16", "bf16")
    )  # fmt: skip
    far = torch.zeros(2)
    for batch in stream(DEVICE, 3, size=4):
        wanted = exact(batch)
        mine = ours(batch)
        with monkeypatch.context() as patch:
            patch.setattr(_fused, "DEVICES", ())
            theirs = layers(batch)
        far += torch.stack([(answer - wanted).norm().cpu() for answer in (mine, theirs)])
    assert 0 < far[0] < 1.5 * far[1]
    assert counted.calls["normed"] > counted.calls["backward"] > 0
    moved = [torch.cat([each.flatten() for each in moving(adapter).values()]) for adapter in (exact, layers, ours)]
    assert (moved[2] - moved[0]).norm() < 1.5 * (moved[1] - moved[0]).norm()
    assert doubles(ours), "both halves at once"
    assert branch_backward(ours).right, "the branch's loss through its own half"


def test_full_precision_is_the_layers_own(counted: Counted) -> None:
    for statistics in (Source(), FromBatch()):
        net = make_net("bn", sharpness=10.0).to(DEVICE)
        poem.adapt(net, "poem", select=Everyone(), statistics=statistics)(stream(DEVICE, 1)[0])
    assert not any(counted.calls.values())


def test_the_sources_statistics_have_kernels_of_their_own(counted: Counted) -> None:
    net = make_net("bn", sharpness=10.0).to(DEVICE)
    poem.adapt(net, "poem", precision="bf16", select=Everyone(), statistics=Source())(stream(DEVICE, 1)[0])
    assert counted.calls["normed_by"] > counted.calls["backward_by"] > 0
    assert counted.calls["normed"] == counted.calls["backward"] == 0


def both(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch, mask: Tensor | None = None, method: str = "poem", **settings: Any
) -> tuple[Tensor, Tensor]:
    """All heads of a net in half precision, with our kernels and with the layers' own."""
    batch = stream(DEVICE, 1)[0]
    adapter = poem.adapt(net.to(DEVICE), method, fast=False, precision="bf16", select=Everyone(), **settings)
    inner, tensors = network(adapter), moving(adapter)

    def heads() -> Tensor:
        with inner.borrowed(DEVICE), torch.no_grad():
            return torch.cat(inner.heads(batch, tensors["theta"], tensors.get("branch"), FromBatch(), {}, mask)[0])

    ours = heads()
    with monkeypatch.context() as patch:
        patch.setattr(_fused, "DEVICES", ())
        return ours, heads()


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """As half precision allows."""
    assert (ours - theirs).norm() < 0.03 * theirs.norm()


def norms(net: nn.Module) -> list[nn.BatchNorm2d]:
    """The batch-norm layers of a net."""
    return [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]


def test_a_masked_pass_is_the_pass_over_those_kept(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net("bn", sharpness=10.0)
    mask = torch.arange(8, device=DEVICE) < 3
    masked, whole = both(net, monkeypatch, mask)[0], both(net, monkeypatch)[0]
    assert_near(*both(net, monkeypatch, mask))
    assert (masked - whole).norm() > 0.1 * whole.norm()


ODD: dict[str, Callable[[Any], Any]] = {
    "eps": lambda layer: setattr(layer, "eps", 0.5),
    "stride": lambda layer: setattr(layer, "weight", nn.Parameter(torch.rand(2 * layer.num_features)[::2])),
    "no bias": lambda layer: layer.register_parameter("bias", None),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
}


@pytest.mark.parametrize("odd", list(ODD))
def test_layers_as_odd_as_they_come(odd: str, fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net("bn", sharpness=10.0)
    for layer in norms(net):
        ODD[odd](layer)
    assert_near(*both(net, monkeypatch, method="poem" if odd in ("eps", "stride") else "tent"))


def test_a_forward_put_into_the_class_is_kept(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.BatchNorm2d.forward
    monkeypatch.setattr(nn.BatchNorm2d, "forward", lambda self, x: 2 * plain(self, x))
    poem.adapt(make_net("bn").to(DEVICE), "tent", precision="bf16")(stream(DEVICE, 1)[0])
    assert not any(counted.calls.values())


def test_moments_are_single_precision_whatever_torch_is_told(fused: Any) -> None:
    x = (20 + 0.5 * torch.randn(2, 8, 32, 32, generator=torch.Generator().manual_seed(0))).to(DEVICE, torch.bfloat16)
    x = x.contiguous(memory_format=LAST)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        mean, rstd = fused.moments(x, 1e-5, 1)
    finally:
        torch.set_default_dtype(before)
    wanted = x.float().var((0, 2, 3), correction=0)
    torch.testing.assert_close(rstd[0].float(), (wanted + 1e-5).rsqrt(), atol=0, rtol=1e-4)
    assert mean.dtype == torch.float32


@pytest.mark.parametrize("small", [0, 1024])
def test_what_is_not_finite_spoils_its_channel(small: int, fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SMALL", small)
    x = torch.rand(2, 8, 8, 8, device=DEVICE).to(torch.bfloat16).contiguous(memory_format=LAST)
    x[1, 3, 2, 2] = torch.inf
    one = torch.ones(8, device=DEVICE)
    y = fused.normed(x, [(one, one)], 1e-5)[0]
    assert y[:, 3].isnan().all()
    assert y[:, [0, 1, 2, 4, 5, 6, 7]].isfinite().all()


def test_there_is_no_second_way_back(fused: Any) -> None:
    x = torch.rand(2, 8, 4, 4, device=DEVICE).contiguous(memory_format=LAST).requires_grad_()
    one = torch.ones(8, device=DEVICE)
    y = _fused.Normed.apply(x, None, 1e-5, False, one, one)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


class Loud(nn.BatchNorm2d):
    """A layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Louder."""
        return 2 * super().forward(x)


def test_a_layer_with_a_forward_of_its_own_keeps_it(counted: Counted) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), Loud(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).to(DEVICE)
    poem.adapt(net, "tent", precision="bf16")(torch.rand(4, 3, 8, 8, device=DEVICE))
    assert not any(counted.calls.values())


def test_where_the_kernels_do_not_run_torch_has_its_own(
    fused: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_: Any, **named: Any) -> None:
        raise RuntimeError("no C compiler found")

    monkeypatch.setattr(fused, "normed", no_compiler)
    monkeypatch.setattr(_fused.TRITON, "_works", {})
    net = make_net("bn", sharpness=10.0).to(DEVICE)
    answer = poem.adapt(net, "tent", precision="bf16", fast=False)(stream(DEVICE, 1)[0])
    assert answer.isfinite().all()
    assert [record.message for record in caplog.records if "no C compiler found" in record.message] != []


def test_one_value_per_channel_is_left_to_the_layer(counted: Counted) -> None:
    layer = nn.BatchNorm2d(4)
    x = torch.rand(2, 4, 1, 1, device=DEVICE, dtype=torch.bfloat16).contiguous(memory_format=LAST)
    assert _fused.fusable(layer, x, groups=1)
    assert not _fused.fusable(layer, x, groups=2), "a group of one row has no variance"
    assert not _fused.fusable(layer, x.float(), groups=1)


def test_a_computed_value_is_cached_for_the_current_images_until_it_is_written_to() -> None:
    early = PrefixCache([], [], lambda module: False)
    one, other, made = torch.rand(2), torch.rand(2), []

    def compute() -> tuple[Tensor]:
        made.append(torch.zeros(1))
        return (made[-1],)

    early.once("piece", one, compute)
    assert len(made) == 1
    early.hold(one)
    for images, times in ((one, 2), (one, 2), (other, 3), (one, 3)):
        early.once("piece", images, compute)
        assert len(made) == times
    made[1].add_(1)
    early.once("piece", one, compute)
    assert len(made) == 4, "somebody wrote into it"
    early.once("another piece", one, compute)
    assert len(made) == 5
    early.hold(None)
    early.once("piece", one, compute)
    assert len(made) == 6
