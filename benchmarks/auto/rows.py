"""The rows of the comparison: a name for each way to answer a stream, and how it is made from a network.

Methods have the constants of their papers: `preset="cifar"` on the small networks, the default one on the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import poem
from poem import zoo

SINGLE = ("source", "bn", "tent", "poem", "sar", "deyo", "eata+poem", "deyo+poem", "roid", "cotta")
"""Published methods, and not adapting."""
GUARDED = ("auto", "tent", "poem", "sar", "deyo", "eata+poem", "deyo+poem", "roid", "cotta")
ROWS = (*SINGLE, "mean6", "auto", *(f"guarded {name}" for name in GUARDED))
FIVE = ("source", "tent", "poem", "auto", "guarded poem")
"""The rows of large networks' sisters."""
SHORT = (*FIVE, "guarded auto")
"""The rows of short batches and of the recurring stream: those five, and guarded `auto`, the default."""
SMALL = ("cifar10-bn", "cifar10-gn", "cifar10-vit", "digits-bn", "digits-gn", "digits-ln")
LARGE = ("resnet50-keras", "vit-tiny16", "effnet-lite0", "effnet-lite1", "effnet-lite2")
NETS = SMALL + LARGE
SEEDS = (0, 1, 2)
WEIGHTS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of the batch's statistics whose answers `mean6` averages."""
PASSES = {
    "source": 1, "bn": 1, "tent": 3, "poem": 7, "sar": 6, "deyo": 5, "eata+poem": 8, "deyo+poem": 9, "roid": 7,
    "cotta": 40, "mean6": 6, "auto": 12,
}  # fmt: skip
"""About how many forward passes a batch costs, to run the dearest tasks first."""

Answer = Callable[[Tensor], Tensor]


def has_batch_norm(net: str) -> bool:
    """Whether a network of the comparison has batch norm."""
    return net.endswith("-bn") or net.startswith(("resnet50-keras", "effnet-lite"))


def names(net: str, stream: str = "clean", batch: int = 64) -> tuple[str, ...]:
    """The rows of a network on a stream."""
    if batch != 64 or stream == "recurring":
        return SHORT
    if net in ("effnet-lite1", "effnet-lite2"):
        return FIVE
    left_out = set() if net in SMALL else {"cotta", "guarded cotta"}
    if not has_batch_norm(net):
        left_out |= {"mean6", "bn"}  # both only choose batch norm's statistics
    return tuple(row for row in ROWS if row not in left_out)


def seeds(net: str) -> tuple[int, ...]:
    """The seeds of a network."""
    return SEEDS if net in SMALL else SEEDS[:1]


def passes(row: str) -> int:
    """About how many forward passes a batch costs."""
    return PASSES[row.removeprefix("guarded ")] + row.startswith("guarded ")


def make(
    row: str,
    model: nn.Module,
    net: str,
    *,
    classes: list[int] | None = None,
    spare: Tensor | None = None,
    seed: int = 0,
    fast: Any = False,
) -> Any:
    """A fresh adapter of a row, guarded if its name says so; call it with images in [0, 1].

    Args:
        row: One of `ROWS`.
        model: The network, borrowed.
        net: Its name in the zoo.
        classes: The data's classes among the logits; None for all.
        spare: Clean images, for EATA's Fisher anchor; without any it runs as ETA.
        seed: Seed of the adapter's random numbers.
        fast: As `poem.adapt` takes it.

    Raises:
        ValueError: There is no such row, or this version has no such method.
    """
    if row not in ROWS:
        raise ValueError(f"expected a row out of {', '.join(ROWS)}; got {row!r}")
    method, base = row.removeprefix("guarded "), zoo.base(net)
    settings: dict[str, Any] = {"mean": base.mean, "std": base.std, "classes": classes, "seed": seed, "fast": fast}
    if "guard" in inspect.signature(poem.adapt).parameters:
        settings["guard"] = False
    if method == "mean6":
        return poem.adapt(model, _mean6(), **settings)
    if method != "auto" and net in SMALL:
        settings["preset"] = "cifar"
    if method.startswith("eata"):
        settings["source_data"] = spare
    adapter = poem.adapt(model, method, **settings)
    return poem.guard(adapter) if row != method else adapter


def _mean6() -> poem.Recipe:
    from poem.parts import Nothing
    from poem.parts.stream_statistics import Blended

    count = len(WEIGHTS)
    statistics = Blended(WEIGHTS, rates=(1.0,) * count, doubts=(0.0,) * count, trust=0.0, caution=0.0)
    return poem.Recipe(parameters=Nothing(), statistics=statistics)


def missing(row: str) -> str:
    """Why this version of the library cannot make a row; empty where it can."""
    model, _ = zoo.load("digits-bn", "random")
    try:
        make(row, model, "digits-bn").unload()
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
