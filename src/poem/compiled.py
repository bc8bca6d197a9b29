"""The network's passes as compiled functions.

A pass is traced once per kind with everything that we do to the model in place: tensors put where parameters stood,
statistics of our choosing, the batch doubled at the split. What comes out is plain operations on tensors, which
`torch.compile` can fuse. With a branch it is cut at the split, so that the branch's own lesson goes back no further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

Function = Callable[..., tuple[Tensor, ...]]


@torch.library.custom_op("poem::split_here", mutates_args=())
def split_here(x: Tensor) -> Tensor:
    """Marks the split in a traced pass; never runs."""
    return x.clone()


@split_here.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@dataclass
class Compiled:
    """Compiled passes, by kind."""

    made: dict[Any, tuple[Function, Any]] = field(default_factory=dict)
    mark: Callable[[Tensor], Tensor] = field(default=split_here)

    def __call__(
        self, kind: Any, run: Callable[..., tuple[list[Tensor], Any]], inputs: list[Tensor]
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What `run(*inputs)` says: tensors, and beside them what does not depend on the images' values."""
        key = kind, torch.is_grad_enabled(), *((x.shape, x.dtype, x.device, x.requires_grad) for x in inputs)
        if key not in self.made:
            self.made[key] = _compiled(run, inputs)
        function, rest = self.made[key]
        return function(*inputs), rest


def _compiled(run: Callable[..., tuple[list[Tensor], Any]], inputs: list[Tensor]) -> tuple[Function, Any]:
    """Trace, cut, compile."""
    rest: Any = None

    def plain(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal rest
        outputs, rest = run(*tensors)
        return tuple(outputs)

    with torch.autocast(inputs[0].device.type, enabled=False):
        traced = make_fx(plain)(*[x.detach().requires_grad_(x.requires_grad) for x in inputs])
    pieces = _cut(traced)
    for name, piece in pieces.named_children():
        setattr(pieces, name, torch.compile(piece, dynamic=False))
    with torch._functorch.config.patch(donated_buffer=False):  # a lesson may keep the graph for the next one
        pieces(*inputs)  # compiled on first use: now
    return pieces, rest


def _cut(traced: GraphModule) -> nn.Module:
    """Two modules in a row: what leads to the split, and what follows from it. One, where there is no split."""
    after: set[Node] = set()
    for node in traced.graph.nodes:
        if node.target is torch.ops.poem.split_here.default or any(each in after for each in node.all_input_nodes):
            after.add(node)
    pieces = split_module(traced, traced, lambda node: int(node in after))
    for piece in pieces.children():
        if isinstance(piece, GraphModule):
            for node in piece.graph.find_nodes(op="call_function", target=torch.ops.poem.split_here.default):
                node.replace_all_uses_with(node.args[0])
                piece.graph.erase_node(node)
            piece.recompile()
    return pieces
