"""Passes of a vision transformer with fewer tokens, and the attention that its class token pays to each patch.

Blocks are found by the network's shape. Tokens are dropped where the first block begins, after positions were added.
The attention of the last block is read from torch's own functions, `scaled_dot_product_attention` or a softmax over a
square matrix, so that it does not matter how a network names its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from poem.engine.anatomy import Anatomy
from poem.engine.norm_layers import ForwardContext

SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
INSTEAD = "use a method without tokens, such as 'tent', 'sar' or 'poem'"


def blocks_of(part: object, model: nn.Module, facts: Anatomy) -> tuple[str, str]:
    """Names of the first and the last block; an error where the network has none."""
    if facts.kind != "blocks" or facts.family != "transformer" or len(facts.stages) < 2 or facts.spatial != 2:
        raise ValueError(
            f"{part!r} drops tokens and needs a vision transformer: patches of an image by a convolution, then equal "
            f"blocks; {type(model).__name__} is none; {INSTEAD}"
        )
    return facts.stages[0], facts.stages[-1]


class Tokens:
    """The first and the last block of the twin, hooked to drop tokens and to read attention."""

    def __init__(self, modules: Mapping[str, nn.Module], blocks: tuple[str, str]) -> None:
        self._first, self._last = (modules[name] for name in blocks)
        before = list(modules.values())[: list(modules).index(blocks[0])]
        self._embed = next((module for module in reversed(before) if isinstance(module, nn.Conv2d)), None)
        self._patches = 0  # of the last pass in which the embedding was not cached
        self._own: Callable[..., Any] = self._last.forward
        self._current: Callable[[], ForwardContext | None] = lambda: None

    def patch(self, current: Callable[[], ForwardContext | None]) -> None:
        """Hook both blocks; called whenever the twin has been rebuilt. `current` is the pass under way."""
        self._current, self._own = current, self._last.forward
        self._first.register_forward_pre_hook(self._drop)
        if self._embed is not None:
            self._embed.register_forward_hook(self._count)
        self._last.__dict__["forward"] = self._watched

    def scores(self, found: Tensor | None) -> Tensor:
        """Attention of the class token to each patch (B, T), the mean over heads; an error where there is none."""
        if found is None or found.shape[1] != self._patches + 1:
            tokens = "no attention was found in the last block" if found is None else f"got {found.shape[1]} tokens"
            raise ValueError(
                f"expected a vision transformer with one class token before {self._patches} patches, {tokens}; "
                f"{INSTEAD}"
            )
        return found[:, 1:]

    def _count(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """At the convolution before the first block: how many patches it made."""
        self._patches = output.shape[-2] * output.shape[-1]

    def _drop(self, _: nn.Module, args: tuple[Any, ...]) -> Any:
        """At the first block: the class token and the patches that are kept."""
        run = self._current()
        if run is None or run.keep is None:
            return None
        x, keep = args[0], run.keep
        keep = torch.cat([keep.new_zeros(len(keep), 1), keep + 1], dim=1).repeat(len(x) // len(keep), 1)
        return x.gather(1, keep[:, :, None].expand(-1, -1, x.shape[2])), *args[1:]

    def _watched(self, *args: Any, **named: Any) -> Any:
        """The last block's forward, and what its class token attends to."""
        run = self._current()
        if run is None or run.keep is not None or not run.training:
            return self._own(*args, **named)
        watch = _Watch()
        with watch:
            output = self._own(*args, **named)
        if watch.found is not None:  # (rows, tokens), (rows, heads, tokens) or (rows * heads, tokens)
            rows = run.rows * (2 if run.doubled else 1)
            by_head = watch.found.reshape(rows, -1, watch.found.shape[-1])
            run.attention = by_head[: run.rows // run.copies].mean(1)
        return output


class _Watch(TorchFunctionMode):
    """Notes the first row of the last attention matrix that is computed inside."""

    found: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # what it calls is not shown; asked again, it gives the matrix
            with torch.no_grad():
                weights = func(*args, **{**kwargs, "need_weights": True, "average_attn_weights": True})[1]
            self.found = None if weights is None else weights[..., 0, :]
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            query, key = given["query"].detach()[..., :1, :], given["key"].detach()
            scale = given.get("scale") or query.shape[-1] ** -0.5
            self.found = (query @ key.transpose(-1, -2) * scale).softmax(-1)[..., 0, :]
        result = func(*args, **kwargs)
        if func in SOFTMAX and result.dim() >= 3 and result.shape[-1] == result.shape[-2]:
            self.found = result.detach()[..., 0, :]
        return result
