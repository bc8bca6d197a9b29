"""Attention whose query, key and value lie in one tensor gets their gradients back in one copy, with the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inside import branch_backward, moving, network
from nets import make_net
from torch import Tensor, nn
from torch.nn import functional as F
from toys import stream

import poem
from poem.accelerate import packed_attention
from poem.accelerate.packed_attention import PackedAttention, packing
from poem.parts import Everyone

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, TOKENS, HEADS, WIDTH = 2, 5, 3, 4
Parts = tuple[Tensor, Tensor, Tensor]


def timm_has_it(x: Tensor) -> Any:
    return x.reshape(ROWS, TOKENS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)


def in_chunks(x: Tensor) -> Any:
    return tuple(each.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in x.chunk(3, -1))


def tokens_first(x: Tensor) -> Any:
    return tuple(x.view(TOKENS, ROWS, 3, HEADS, WIDTH).permute(2, 1, 3, 0, 4))


def heads_outside(x: Tensor) -> Any:
    return x.view(ROWS, TOKENS, HEADS, 3, WIDTH).permute(3, 0, 2, 1, 4).unbind(0)


def one_after_another(x: Tensor) -> Any:
    return x.view(3, ROWS, TOKENS, HEADS, WIDTH).transpose(2, 3).unbind(0)


def one_head(x: Tensor) -> Any:
    return x.view(ROWS, TOKENS, 3, 1, HEADS * WIDTH).permute(2, 0, 3, 1, 4).unbind(0)


def one_token(x: Tensor) -> Any:
    return x.view(ROWS * TOKENS, 1, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)


def torch_has_it(x: Tensor) -> Any:
    parts = x.unflatten(-1, (3, HEADS * WIDTH)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    return tuple(each.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in parts)


def normalised(x: Tensor) -> Any:
    q, k, v = timm_has_it(x)
    return F.normalize(q, dim=-1), k, v


def another_order(x: Tensor) -> Any:
    return timm_has_it(x)[::-1]


def one_for_two(x: Tensor) -> Any:
    q, k, _ = timm_has_it(x)
    return q, k, k


def a_gap(x: Tensor) -> Any:
    return tuple(each[:, :, 1:] for each in timm_has_it(x))


def meeting(x: Tensor) -> Any:
    flat = x.flatten()
    parts = (part.view(ROWS, HEADS, TOKENS, WIDTH)[:1].expand(ROWS, -1, -1, -1) for part in flat.chunk(3))
    return tuple(parts)


def three_tensors(x: Tensor) -> Any:
    return tuple(each * 1 for each in timm_has_it(x))


class Tenth(torch.autograd.Function):
    """A model's own function: a view whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 0.1 * gradients[0]


def scaled(x: Tensor) -> Any:
    return timm_has_it(Tenth.apply(x))


def listened_to(x: Tensor) -> Any:
    q, k, v = timm_has_it(x)
    q.register_hook(lambda gradient: 0 * gradient)
    return q, k, v


TAKEN = [timm_has_it, in_chunks, tokens_first, heads_outside, one_after_another, one_head, one_token, torch_has_it]
LEFT = [normalised, another_order, one_for_two, a_gap, meeting, three_tensors, scaled, listened_to]


def attended(apart: Callable[[Tensor], Parts], dtype: torch.dtype, *, watched: bool) -> tuple[Tensor, Tensor, bool]:
    """What attention answers, the gradient of what it was computed from, and whether views were handed over."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, TOKENS, 3 * HEADS * WIDTH, generator=rng).to(DEVICE, dtype).requires_grad_()
    attention = PackedAttention(nn.Identity())
    attention.used = None if watched else False
    with attention.passing():
        y = F.scaled_dot_product_attention(*apart(x * 1))
    weights = torch.randn(y.shape, generator=rng).to(DEVICE, dtype)
    return y, torch.autograd.grad((y * weights).sum(), x)[0], bool(attention.used)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apart", [*TAKEN, *LEFT])
def test_gradients_are_torchs_to_the_bit(apart: Callable[[Tensor], Parts], dtype: torch.dtype) -> None:
    mine, theirs = (attended(apart, dtype, watched=watched) for watched in (True, False))
    assert mine[2] == (apart in TAKEN)
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])
    assert mine[1].any()


@pytest.mark.parametrize("watched", [True, False])
def test_views_of_a_tensor_that_was_written_to_since_are_torchs_error(watched: bool) -> None:
    def written_to(base: Tensor) -> Parts:
        parts: Parts = in_chunks(base)
        base.mul_(2)
        return parts

    with pytest.raises(RuntimeError, match="has been modified inplace"):
        attended(written_to, torch.float32, watched=watched)


def test_without_a_gradient_nothing_is_taken() -> None:
    base = torch.randn(ROWS, TOKENS, 3 * HEADS * WIDTH)
    assert packing(*in_chunks(base)) is None
    with torch.no_grad():
        assert packing(*in_chunks(base.requires_grad_())) is None


def test_inside_vmap_nothing_is_taken() -> None:
    def loss(base: Tensor) -> Tensor:
        with PackedAttention(nn.Identity()).passing():
            return F.scaled_dot_product_attention(*in_chunks(base * 1)).square().sum()

    many = torch.randn(2, ROWS, TOKENS, 3 * HEADS * WIDTH, requires_grad=True)
    mine = torch.vmap(loss)(many)
    torch.testing.assert_close(mine, torch.stack([loss(each) for each in many]))


# Adapters -------------------------------------------------------------------------------------------------------------


def adapted(net: nn.Module, method: str = "tent", **settings: Any) -> poem.Adapter:
    """An adapter in half precision, which learns from every sample."""
    given: dict[str, Any] = {"precision": "bf16", "select": Everyone(), "fast": False, "lr": 0.02, **settings}
    adapter: poem.Adapter = poem.adapt(net.to(DEVICE), method, **given)
    return adapter


def attention_of(adapter: poem.Adapter) -> PackedAttention:
    found: PackedAttention = network(adapter).acceleration.attention  # type: ignore[attr-defined]
    return found


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each attention was asked about."""
    seen: list[int] = []
    own = packed_attention.packing

    def packing(*parts: Any) -> Any:
        seen.append(len(parts))
        return own(*parts)

    monkeypatch.setattr(packed_attention, "packing", packing)
    return seen


class Attending(nn.Module):
    """Four blocks of attention as timm has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.Sequential(*[AttentionBlock() for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.blocks(self.patch(x).flatten(2).transpose(1, 2))
        logits: Tensor = 9 * self.head(self.norm(tokens).mean(1))
        return logits


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        parts = self.qkv(self.norm(x)).reshape(rows, tokens, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(rows, tokens, 8)
        added: Tensor = x + self.proj(mixed)
        return added


@pytest.mark.parametrize("method", ["tent", "poem"])
def test_an_adapter_learns_the_same(method: str, handed: list[int]) -> None:
    settings = {"split": "blocks.2", "rounds": 1} if method == "poem" else {}
    ours, theirs = (adapted(Attending(), method, **settings) for _ in range(2))
    for batch in stream(DEVICE, 3):
        attention_of(theirs).used = False
        # On a GPU attention's own backward adds in no fixed order.
        torch.testing.assert_close(ours(batch), theirs(batch), rtol=0, atol=0 if DEVICE == "cpu" else 2e-2)
    assert attention_of(ours).used
    assert handed
    assert ours.totals.updates == 3
    for key, one in moving(ours).items():
        torch.testing.assert_close(one, moving(theirs)[key], rtol=0, atol=0 if DEVICE == "cpu" else 2e-2)
    if method == "poem":
        assert branch_backward(ours).right, "beyond the split, too"


def test_beyond_the_split_views_are_of_what_autograd_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    own, linear = packed_attention.packing, nn.Linear.forward

    def packing(*parts: Any) -> Any:
        found = own(*parts)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(packed_attention, "packing", packing)
    # As torch does it on a GPU: the layer's output is a view, made where autograd does not look.
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: linear(self, x.flatten(0, -2)).view(*x.shape[:-1], -1))
    adapted(Attending(), "poem", split="blocks.2", rounds=1)(stream(DEVICE, 1)[0])
    assert seen
    assert all(seen)


def test_a_model_without_attention_is_asked_once(handed: list[int]) -> None:
    adapter = adapted(make_net("gn", sharpness=10.0))
    adapter(stream(DEVICE, 1)[0])
    assert attention_of(adapter).used is False
    assert not handed


def test_hooks_are_called_with_the_gradient_they_had(handed: list[int]) -> None:
    net = Attending()
    seen: list[Tensor] = []

    def watch(_: nn.Module, __: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(seen.append)

    net.blocks[1].qkv.register_forward_hook(watch)  # type: ignore[union-attr]
    adapted(net)(stream(DEVICE, 1)[0])
    assert seen
    assert not handed


def test_a_copy_of_an_adapter_asks_its_own_model(handed: list[int]) -> None:
    adapter = adapted(Attending())
    twin = copy.deepcopy(adapter)
    model: Any = network(twin).model
    model.blocks[0].register_forward_hook(lambda *_: None)
    for each, many in ((twin, 0), (adapter, 4)):
        handed.clear()
        each(stream(DEVICE, 1)[0])
        assert len(handed) == many


def test_full_precision_is_torchs(handed: list[int]) -> None:
    adapter = adapted(Attending(), precision="fp32")
    adapter(stream(DEVICE, 1)[0])
    assert attention_of(adapter) is None
    assert not handed
