"""The network's forward passes as compiled functions.

A pass is traced once per kind with everything that we do to the model in place: tensors put where parameters stood,
the recipe's statistics, the batch doubled at the split. The result is plain operations on tensors, which
`torch.compile` can fuse. It is cut in three: what follows from the images alone is computed once per batch, and the
backward pass of the branch's own loss ends at the split.
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

from poem.accelerate.batch_norm import work as kernels_work
from poem.engine.network import Network
from poem.engine.norm_layers import ForwardContext

PlainPass = Callable[..., tuple[list[Tensor], Any]]
Once = Callable[[Any, Tensor, Callable[[], Any]], Any]
EARLY, SHALLOW, DEEP = range(3)


def _copied(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The value after a copy; torch has no backward for the copy itself."""
    return source.to(into.dtype).expand(into.shape)


@torch.library.custom_op("poem::split_here", mutates_args=())
def split_here(x: Tensor) -> Tensor:
    """Marks the split in a traced pass; never runs."""
    return x.clone()


@split_here.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class FromImages(nn.Module):
    """A piece that depends on the images and frozen weights alone, run once for the images that are held."""

    def __init__(self, piece: Callable[..., Any], images: int, once: Once) -> None:
        super().__init__()
        self._piece, self._images, self._once = piece, images, once

    def forward(self, *given: Tensor) -> Any:
        """The outputs for these images, cached."""
        return self._once(self, given[self._images], lambda: self._ask(*given))

    @torch.no_grad()
    def _ask(self, *given: Tensor) -> Any:
        return self._piece(*given)


@dataclass
class CompiledPasses:
    """Compiled passes of a network, by kind. `once` caches what was computed from the images that are held."""

    network: Network
    once: Once
    made: dict[Any, tuple[nn.Module, Any]] = field(default_factory=dict)
    beginnings: dict[tuple[torch.Size, str], FromImages] = field(default_factory=dict)
    mark: Callable[[Tensor], Tensor] = field(default=split_here)

    def heads(
        self, images: Tensor, theta: Tensor | None, branch: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, ...]:
        """The logits of each head, compiled once for each kind of pass; what it records is put into `context`."""
        network = self.network
        statistics = {key: value for key, value in context.memory.items() if "statistics." in key}
        given = {"images": images, "theta": theta, "branch": branch, "mask": context.mask, **statistics}
        inputs = {key: value for key, value in given.items() if value is not None}

        def plain(*tensors: Tensor) -> tuple[list[Tensor], tuple[int, bool, list[str]]]:
            now = dict(zip(inputs, tensors, strict=True))
            network.tracing = True
            try:
                heads, traced = network.heads(
                    now["images"], now.get("theta"), now.get("branch"), context.statistics,
                    {key: now[key] for key in statistics}, now.get("mask"), training=context.training,
                )  # fmt: skip
            finally:
                network.tracing = False
            more = [] if traced.features is None else [traced.features]
            return [*heads, *more, *traced.record.values()], (len(heads), bool(more), list(traced.record))

        kernels_work(images.device)  # tried before anything is traced
        kind = context.statistics, context.training, *inputs, *network.capture_key()
        outputs, (count, features, record) = self(kind, plain, inputs)
        context.features = outputs[count] if features else None
        context.record = dict(zip(record, outputs[count + features :], strict=True))
        return outputs[:count]

    def __call__(self, kind: Any, run: PlainPass, inputs: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Any]:
        """The tensors of `run(*inputs)`, and beside them what does not depend on the images' values."""
        tensors = list(inputs.values())
        key = kind, torch.is_grad_enabled(), *((x.shape, x.dtype, x.device, x.requires_grad) for x in tensors)
        if key not in self.made:
            traced, rest = _traced(run, tensors)
            whole = self._compiled(_cut(traced, list(inputs)), tensors[0].shape)
            # The backward pass of the branch's loss keeps the graph for that of theta.
            with torch._functorch.config.patch(donated_buffer=False):
                whole(*tensors)  # compiled on first use: now
            self.made[key] = whole, rest
        pieces, rest = self.made[key]
        return pieces(*tensors), rest

    def forget(self) -> None:
        """Free everything compiled."""
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


def _traced(run: PlainPass, tensors: list[Tensor]) -> tuple[GraphModule, Any]:
    """A pass as operations that write nowhere: only then may they be cut by what depends on what."""
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

    The branch's tensors belong to the rest, wherever they are first used: its backward pass must not go through what
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
