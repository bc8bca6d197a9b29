"""The network's passes as compiled functions.

A pass is traced once per kind with everything that we do to the model in place: tensors put where parameters stood,
statistics of our choosing, the batch doubled at the split. What comes out is plain operations on tensors, which
`torch.compile` can fuse. It is cut in three: what follows from the images alone is computed once per batch, and the
branch's own lesson goes back no further than the split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

Run = Callable[..., tuple[list[Tensor], Any]]
Once = Callable[[Any, Tensor, Callable[[], Any]], Any]
EARLY, SHALLOW, DEEP = range(3)


def _copied(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What stands where something was copied to; torch has no way back through it."""
    return source.to(into.dtype).expand(into.shape)


@torch.library.custom_op("poem::split_here", mutates_args=())
def split_here(x: Tensor) -> Tensor:
    """Marks the split in a traced pass; never runs."""
    return x.clone()


@split_here.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class FromImages(nn.Module):
    """A piece that depends on the images and frozen weights alone, asked once for the images in hand."""

    def __init__(self, piece: Callable[..., Any], images: int, once: Once) -> None:
        super().__init__()
        self._piece, self._images, self._once = piece, images, once

    def forward(self, *given: Tensor) -> Any:
        """What it says of these images, or said before."""
        return self._once(self, given[self._images], lambda: self._ask(*given))

    @torch.no_grad()
    def _ask(self, *given: Tensor) -> Any:
        return self._piece(*given)


@dataclass
class Compiled:
    """Compiled passes, by kind. `once` remembers what was computed from the images in hand."""

    once: Once
    made: dict[Any, tuple[nn.Module, Any]] = field(default_factory=dict)
    beginnings: dict[tuple[torch.Size, str], FromImages] = field(default_factory=dict)
    mark: Callable[[Tensor], Tensor] = field(default=split_here)

    def __call__(self, kind: Any, run: Run, inputs: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Any]:
        """What `run(*inputs)` says: tensors, and beside them what does not depend on the images' values."""
        tensors = list(inputs.values())
        key = kind, torch.is_grad_enabled(), *((x.shape, x.dtype, x.device, x.requires_grad) for x in tensors)
        if key not in self.made:
            traced, rest = _traced(run, tensors)
            whole = self._compiled(_cut(traced, list(inputs)), tensors[0].shape)
            with torch._functorch.config.patch(donated_buffer=False):  # a lesson may keep the graph for the next one
                whole(*tensors)  # compiled on first use: now
            self.made[key] = whole, rest
        pieces, rest = self.made[key]
        return pieces(*tensors), rest

    def forget(self) -> None:
        """Let go of everything compiled."""
        self.made.clear()
        self.beginnings.clear()

    def _compiled(self, pieces: GraphModule, shape: torch.Size) -> GraphModule:
        """Each piece compiled; the first is the same for every kind of pass that begins with it."""
        images = next(iter(pieces.graph.nodes)).name
        for name, piece in pieces.named_children():
            assert isinstance(piece, GraphModule)
            if name != f"submod_{EARLY}":
                setattr(pieces, name, _quick(piece))
                continue
            place = [node.name for node in piece.graph.find_nodes(op="placeholder")].index(images)
            key = shape, piece.code  # weights are handed in
            if key not in self.beginnings:
                self.beginnings[key] = FromImages(_quick(piece), place, self.once)
            setattr(pieces, name, self.beginnings[key])
        return pieces


def _traced(run: Run, tensors: list[Tensor]) -> tuple[GraphModule, Any]:
    """All that a pass does, as operations that write nowhere: only then may they be cut by what depends on what."""
    rest: Any = None

    def plain(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal rest
        outputs, rest = run(*tensors)
        return tuple(outputs)

    given = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
    with torch.autocast(tensors[0].device.type, enabled=False):
        trace = make_fx(torch.func.functionalize(plain), decomposition_table={torch.ops.aten.copy.default: _copied})
        traced = trace(*given)
    return traced, rest


def _quick(piece: nn.Module) -> nn.Module:
    quick: Any = torch.compile(piece, dynamic=False)
    return quick  # type: ignore[no-any-return]


def _cut(traced: GraphModule, inputs: list[str]) -> GraphModule:
    """Up to three modules in a row: what follows from the images alone, what leads to the split, and the rest.

    The branch's numbers belong to the rest, wherever they are first touched: its lesson must not pass through what
    leads to the split.
    """
    kinds = {"images": EARLY, "branch": DEEP}
    places: dict[Node, int] = {}
    given = iter(inputs)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            places[node] = kinds.get(next(given), SHALLOW)
        else:
            own = DEEP if node.target is torch.ops.poem.split_here.default else EARLY
            places[node] = max([own, *(places[each] for each in node.all_input_nodes)])
    images = next(iter(traced.graph.nodes))
    if not any(places[node] == EARLY for node in images.users):  # nothing follows from them alone
        places = {node: max(SHALLOW, place) for node, place in places.items()}
    pieces = split_module(traced, traced, places.__getitem__)
    for piece in pieces.children():
        if isinstance(piece, GraphModule):
            for node in piece.graph.find_nodes(op="call_function", target=torch.ops.poem.split_here.default):
                node.replace_all_uses_with(node.args[0])
                piece.graph.erase_node(node)
            piece.recompile()
    return pieces
