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
EARLY, SHALLOW, DEEP = range(3)


@torch.library.custom_op("poem::split_here", mutates_args=())
def split_here(x: Tensor) -> Tensor:
    """Marks the split in a traced pass; never runs."""
    return x.clone()


@split_here.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


Once = Callable[[Any, Tensor, Callable[[], Any]], Any]


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
    early: dict[tuple[torch.Size, str], FromImages] = field(default_factory=dict)
    mark: Callable[[Tensor], Tensor] = field(default=split_here)

    def __call__(self, kind: Any, run: Run, inputs: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Any]:
        """What `run(*inputs)` says: tensors, and beside them what does not depend on the images' values."""
        tensors = list(inputs.values())
        key = kind, torch.is_grad_enabled(), *((x.shape, x.dtype, x.device, x.requires_grad) for x in tensors)
        if key not in self.made:
            self.made[key] = self._compiled(run, inputs)
        pieces, rest = self.made[key]
        return pieces(*tensors), rest

    def _compiled(self, run: Run, inputs: Mapping[str, Tensor]) -> tuple[nn.Module, Any]:
        """Trace, cut, compile."""
        rest: Any = None

        def plain(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal rest
            outputs, rest = run(*tensors)
            return tuple(outputs)

        tensors = list(inputs.values())
        with torch.autocast(tensors[0].device.type, enabled=False):
            traced = make_fx(plain)(*[x.detach().requires_grad_(x.requires_grad) for x in tensors])
        pieces = cut(traced, list(inputs))
        traced_images = next(iter(traced.graph.nodes)).name, tensors[0].shape
        for name, piece in pieces.named_children():
            assert isinstance(piece, GraphModule)
            early = name == f"submod_{EARLY}"
            setattr(pieces, name, self._early(piece, *traced_images) if early else _quick(piece))
        with torch._functorch.config.patch(donated_buffer=False):  # a lesson may keep the graph for the next one
            pieces(*tensors)  # compiled on first use: now
        return pieces, rest

    def _early(self, piece: GraphModule, images: str, shape: torch.Size) -> FromImages:
        """The first piece, the same for every kind of pass that begins with it; weights are handed in."""
        place = [node.name for node in piece.graph.find_nodes(op="placeholder")].index(images)
        key = shape, piece.code
        if key not in self.early:
            self.early[key] = FromImages(_quick(piece), place, self.once)
        return self.early[key]


def _quick(piece: nn.Module) -> nn.Module:
    quick: Any = torch.compile(piece, dynamic=False)
    return quick  # type: ignore[no-any-return]


def cut(traced: GraphModule, inputs: list[str]) -> GraphModule:
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
