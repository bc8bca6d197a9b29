"""Finds a classifier's norm layers, stages and head by their shape, never by the names their author chose."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from poem._util.nearest import nearest_names

NORMS: tuple[type[nn.Module], ...] = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)  # _NormBase: batch, instance

Named = tuple[str, nn.Module]


def has_batch_norm(model: nn.Module) -> bool:
    """Whether any layer normalises over the batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module normalises: one of `NORMS`, or built like one.

    Built like one: the only parameters in it are its own one-dimensional `weight` and perhaps `bias`, and it has an
    `eps` (`variance_epsilon`, ...). A norm layer without parameters counts too; `affine` tells the two apart.
    """
    own = affine(module)
    built_like_one = (
        "weight" in own
        and own.keys() <= {"weight", "bias"}
        and all(p.dim() == 1 for p in own.values())
        and len(list(module.parameters())) == len(own)
        and any(key.split("_")[-1] in ("eps", "epsilon") for key in vars(module))
    )
    return isinstance(module, NORMS) or built_like_one


def affine(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters a norm layer scales and shifts with, by name; empty when it has none."""
    return dict(module.named_parameters(recurse=False))


WITHOUT_NORMS = (
    "try a method without a branch and parameters=Everything(), as in poem.adapt(model, 'tent', "
    "parameters=Everything()), or one that learns nothing: 'source', 'lame'"
)
"""What to type where a network has no norm layers and a method needs them."""


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Facts about a classifier, found from its shape.

    "Before" and "after" mean the order in which modules were registered, which is the order of the flow in nearly every
    network. Names are those of `model.named_modules()`.

    Attributes:
        kind: `"stages"` (resolution falls from one to the next) or `"blocks"` (equal ones in a row).
        family: `"transformer"` where layer or RMS norms are the majority, else `"convolutional"`; picks the
            learning-rate column.
        norms: every norm layer.
        stages: the first module of each stage or block; only what holds a norm layer.
        top: the norm layers that SAR and its kin leave alone: those of the last stage, or of the last quarter of the
            blocks, and all that come after. Empty where that would be every norm layer.
        head: the linear layer or 1x1 convolution that gives the logits; None if something else does.
        channels: what the first convolution takes in; None without a convolution.
        spatial: dimensions of the first convolution beside batch and channels: 2 for images; None without one.
        modules: every module, in order.
    """

    kind: str
    family: str
    norms: tuple[str, ...]
    stages: tuple[str, ...]
    top: tuple[str, ...]
    head: str | None
    channels: int | None
    spatial: int | None
    modules: tuple[str, ...] = field(repr=False)

    def split(self, depth: int = 1) -> str:
        """Name the module whose input is the split point: the `depth`-th stage or block from the end.

        Raises:
            ValueError: When the network has no such stage, or no norm layer before it.
        """
        deepest = sum(1 for stage in self.stages if self.below(stage))
        if not self.norms:
            raise ValueError(
                "expected norm layers on both sides of a split, found 0 in all: nothing for the adapt branch; "
                f"{WITHOUT_NORMS}"
            )
        if deepest == 0:
            raise ValueError(
                f"expected norm layers on both sides of a split, found {len(self.norms)} in all: the network has too "
                "little below the split; pass split='name of a module'"
            )
        if not 1 <= depth <= deepest:
            raise ValueError(
                f"expected depth 1..{deepest} for a network of {len(self.stages)} {self.kind}, got {depth}; "
                "or pass split='name of a module'"
            )
        return self.stages[-depth]

    def below(self, module: str) -> tuple[str, ...]:
        """List the norm layers before a module."""
        beyond = set(self.beyond(module))
        return tuple(norm for norm in self.norms if norm not in beyond)

    def beyond(self, module: str) -> tuple[str, ...]:
        """List the norm layers inside or after a module, itself included.

        Raises:
            ValueError: When the network has no module of that name.
        """
        if module not in self.modules:
            near = nearest_names(module, self.modules, most=3, cutoff=0.4) or self.stages[-3:]
            raise ValueError(f"expected the name of a module, got {module!r}; nearest: {', '.join(map(repr, near))}")
        # Depth first, parents before children: what stands later in the list is inside or after.
        later = set(self.modules[self.modules.index(module) :])
        return tuple(norm for norm in self.norms if norm in later)


def anatomy(model: nn.Module) -> Anatomy:
    """Find the norm layers, stages, split points and head of any classifier.

    1. Trunk: from the root, descend while one child holds more than 80 % of the norm layers (a plain list of modules:
       more than half, as lists have no place of their own in the flow).
    2. Blocks: at least three of the trunk's children, and three quarters of those with norm layers inside, are equal in
       class and parameter shapes; all children of that class are blocks.
    3. Stages: otherwise two to six children have several norm layers inside (or, where none has, one); each is a stage.
    4. Otherwise the children form a chain of units: weights, their norm layer, and what follows until the next weights.
       A stage begins at a unit that lowers the resolution, or after it where that is the last thing it does. Where the
       last stage would hold more than 80 % of the norm layers, the units are blocks.

    Two norm layers or more always give a split with some on either side: at worst each layer is a block of its own.
    A network without norm layers has an empty anatomy.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    norms = tuple(name for name, module in model.named_modules() if is_norm(module))
    layerwise = sum(not isinstance(modules[name], _NormBase | nn.GroupNorm) for name in norms)
    weights = (name for name, m in reversed(modules.items()) if any(p.dim() > 1 for p in affine(m).values()))
    head = next(weights, None)
    kind, stages = _divide(_children(_trunk(("", model))))
    first = next((m for m in modules.values() if isinstance(m, _ConvNd)), None)
    facts = Anatomy(
        kind=kind,
        family="transformer" if 2 * layerwise > len(norms) else "convolutional",
        norms=norms,
        stages=stages,
        top=(),
        head=head if head is not None and _is_linear(modules[head]) else None,
        channels=first.in_channels if first is not None else None,
        spatial=len(first.kernel_size) if first is not None else None,
        modules=tuple(modules),
    )
    if not stages or not (facts.below(stages[-1]) or len(norms) == 1):
        facts = replace(facts, kind="blocks", stages=norms)
    last = 1 if facts.kind == "stages" else max(1, len(facts.stages) // 4)
    top = facts.beyond(facts.stages[-last]) if norms else ()
    return replace(facts, top=top if top != norms else ())


def _trunk(root: Named) -> Named:
    """Descend to the module whose children are the stages or blocks."""
    inside = _count(root)
    children = [child for child in _children(root) if not is_norm(child[1])]
    shares = [0.8 if _runs(child) or not _runs(root) else 0.5 for child in children]
    heavy = [child for child, share in zip(children, shares, strict=True) if _count(child) > share * inside]
    return _trunk(heavy[0]) if heavy else root


def _divide(children: list[Named]) -> tuple[str, tuple[str, ...]]:
    """Cut the trunk into blocks or stages: the kind, and the first module of each."""
    deep = [child for child in children if _count(child) and not is_norm(child[1])]
    large = [child for child in deep if _count(child) > 1] or deep
    shapes = Counter((type(child), *(tuple(p.shape) for p in child.parameters())) for _, child in deep)
    (common, *_), equal = max(shapes.items(), key=lambda item: item[1], default=((None,), 0))
    if equal >= 3 and 4 * equal >= 3 * len(deep):
        kind, first = "blocks", [child for child in deep if type(child[1]) is common]
    elif 2 <= len(large) <= 6:
        kind, first = "stages", large
    else:
        units = [unit for unit in _units(children) if _count(*unit)]
        stretches = _stretches(units)
        kind = "stages" if stretches and _count(*stretches[-1]) <= 0.8 * _count(*children) else "blocks"
        first = [part[0] for part in (stretches if kind == "stages" else units)]
    return kind, tuple(_entry(child) for child in first)


def _units(children: list[Named]) -> list[list[Named]]:
    """Chain the children into units: weights, their norm layer, and what follows until the next weights."""
    units: list[list[Named]] = []
    for child in children:
        weighty = not is_norm(child[1]) and any(True for _ in child[1].parameters())
        if not units or (weighty and _count(*units[-1])):
            units.append([])
        units[-1].append(child)
    return units


def _stretches(units: list[list[Named]]) -> list[list[Named]]:
    """Join neighbouring units of one resolution."""
    stretches: list[list[Named]] = []
    begins = True
    for unit in units:
        leaves = [m for _, child in unit for m in child.modules() if not any(True for _ in m.children())]
        lowers = [leaf for leaf in leaves if _lowers(leaf)]
        # A transition that ends in its only pooling still works at the old resolution.
        late = len(lowers) == 1 and lowers[0] is leaves[-1]
        if begins or (lowers and not late):
            stretches.append([])
        stretches[-1].extend(unit)
        begins = late
    return stretches


def _children(parent: Named) -> list[Named]:
    return [(f"{parent[0]}.{name}".lstrip("."), child) for name, child in parent[1].named_children()]


def _entry(part: Named) -> str:
    """Name the first module of a part that runs: a plain list of modules does not."""
    inside = _children(part)
    return part[0] if _runs(part) or not inside else _entry(inside[0])


def _runs(part: Named) -> bool:
    return type(part[1]).forward is not nn.Module.forward


def _count(*parts: Named) -> int:
    return sum(is_norm(inner) for _, module in parts for inner in module.modules())


def _lowers(module: nn.Module) -> bool:
    """Tell whether a layer lowers the resolution: a convolution or pooling with a stride above 1."""
    stride = getattr(module, "stride", 1)
    steps = stride if isinstance(stride, tuple | list) else (stride,)
    return not isinstance(module, _ConvTransposeNd) and any(isinstance(step, int) and step > 1 for step in steps)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (isinstance(module, _ConvNd) and set(module.kernel_size) == {1})
