"""The rows of the study: a name says what answers a stream, and `make` builds it from a network.

A name is a method of `poem.methods()`, then changes after commas, then the statistics if they are not the published
ones: `tent`, `sar+poem-i`, `poem, threshold 0.2`, `tent, read last`, `deyo+poem [auto statistics]`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from auto.rows import SMALL, has_batch_norm
from torch import Tensor, nn

import poem
from poem import Recipe, zoo
from poem.parts import AdaptBranch, Entropy, NormAffine, Once, Repeat
from poem.recipes.learning_rate import Rule

AUTO_STATISTICS = " [auto statistics]"
"""End of a row's name: batch norm takes the statistics that `auto` takes there, and nothing else changes."""
MAIN = (
    "source", "bn", "tent", "eata", "sar", "deyo", "roid", "rotta", "tent+poem", "eata+poem", "sar+poem", "deyo+poem",
    "roid+poem", "poem", "auto",
)  # fmt: skip
"""The rows of every stream; `rotta` takes no `+poem`, since it learns from a bank of images."""
STATISTICS_FIRST = tuple(row + AUTO_STATISTICS for row in ("bn", "tent", "poem"))
"""`bn [auto statistics]` learns nothing: what `auto`'s statistics give alone."""
STATISTICS_THEN = tuple(row + AUTO_STATISTICS for row in ("tent+poem", "eata", "eata+poem", "deyo", "deyo+poem"))
STATISTICS_LAST = tuple(row + AUTO_STATISTICS for row in ("sar", "sar+poem", "roid", "roid+poem"))
"""Without `rotta`, whose teacher has statistics of its own, which are part of the method."""
STATISTICS = STATISTICS_FIRST + STATISTICS_THEN + STATISTICS_LAST
FIRST = ("source", "tent", "poem", "deyo", "deyo+poem", "auto")
"""The main methods: scenarios."""
FEW = ("source", "tent", "poem", "auto")
"""Single images, other batch sizes, and the sisters of Lite0."""
NEWEST = (
    "source", "spa", "cmf", "rem", "rpl", "petta", "protected", "recap", "cmf+poem", "rem+poem", "rpl+poem",
    "protected+poem", "recap+poem",
)  # fmt: skip
TRANSFORMERS_ONLY = ("rem", "rem+poem")
HOSTS = ("tent", "tent-filtered", "eata", "sar", "deyo", "roid")
"""Methods whose parts are told apart."""
PARTS_OF = tuple(
    f"{host}{ending}"
    for host in HOSTS
    for ending in (", read last", "*", "+poem-i", "+poem-ii")
    if not (host == "tent-filtered" and ending.startswith("+"))
)
"""Of each host: its own answer after the update, its update twice, exploration alone, the branch alone.

`tent+poem-i` has the filter of `tent-filtered`, and so is `tent-filtered+poem-i`; `tent+poem-ii` alike.
"""
OF_POEM = (
    "poem, no branch", "poem, no exploration", "poem, first selection twice", "poem, branch by entropy",
    "poem, read first", "poem-official",
)  # fmt: skip
SETTINGS = (
    *(f"poem, threshold {value}" for value in (0.1, 0.2, 0.5, 0.6, 0.8, 1.0)),
    *(f"poem, rounds {value}" for value in (1, 3, 4, 5)),
    *(f"poem, ratio {value}" for value in (0.0, 0.25, 0.75, 1.0)),
    *(f"poem, depth {value}" for value in (2, 3)),
    *(f"{row}, rate x{value}" for row in ("tent", "poem") for value in (0.25, 4, 16)),
    "deyo+poem, rate x4",
    *(f"{row}, threshold {value}" for row in ("eata", "sar", "deyo") for value in (0.2, 0.6, 0.8)),
)
DECIDING = ("source", "tent", "tent-filtered", *OF_POEM, *PARTS_OF)
"""Variants that the study's questions are answered by."""
VARIANTS = (*DECIDING, "tent, shallow layers", *SETTINGS)
RECORDED = tuple(f"{row}, recorded" for row in ("poem", "tent+poem", "eata+poem", "sar+poem", "deyo+poem"))
"""The same rows with what became of each sample, and so a second measurement of them."""
GRADIENTS = ("poem, recorded with gradients",)

Change = Callable[[Recipe, str], Recipe]


def _rate(recipe: Recipe, factor: str) -> Recipe:
    """The learning rate times a factor such as `x4`; a rule's rates times it."""
    times, lr = float(factor.removeprefix("x")), recipe.lr
    if isinstance(lr, Rule):
        return replace(
            recipe, lr=replace(lr, convolutional=lr.convolutional * times, transformer=lr.transformer * times)
        )
    return replace(recipe, lr=lr * times)


CHANGES: dict[str, Change] = {
    "threshold": lambda recipe, value: recipe.changed({"threshold": float(value)}),
    "rounds": lambda recipe, value: recipe.changed({"rounds": int(value)}),
    "ratio": lambda recipe, value: recipe.changed({"alpha": float(value)}),
    "depth": lambda recipe, value: recipe.changed({"depth": int(value)}),
    "rate": _rate,
    "read last": lambda recipe, _: recipe.changed({"readout": "last"}),
    "read first": lambda recipe, _: recipe.changed({"readout": "first"}),
    "no branch": lambda recipe, _: replace(recipe, branch=None),
    "no exploration": lambda recipe, _: replace(recipe, explore=Once()),
    "first selection twice": lambda recipe, _: replace(recipe, explore=Repeat(2)),
    "branch by entropy": lambda recipe, _: replace(recipe, branch=AdaptBranch(teach=Entropy())),
    "shallow layers": lambda recipe, _: replace(recipe, parameters=NormAffine("excluded")),
    "recorded": lambda recipe, _: recipe,
    "recorded with gradients": lambda recipe, _: recipe,
}
"""What may come after a comma in a row's name: words, or a word and a value."""


def recipe_of(row: str, net: str) -> Recipe:
    """The recipe of a row, with the published constants that fit the network.

    Raises:
        ValueError: The name has a method or a change that there is none of, or the network has no batch norm to choose
            statistics for.
    """
    method, *changes = row.removesuffix(AUTO_STATISTICS).split(", ")
    found = poem.recipe(method, "cifar" if net in SMALL else "imagenet")
    for text in changes:
        word, value = (text, "") if text in CHANGES else text.rsplit(" ", 1)
        if word not in CHANGES:
            raise ValueError(f"expected changes out of {', '.join(CHANGES)} in {row!r}, got {text!r}")
        found = CHANGES[word](found, value)
    if row.endswith(AUTO_STATISTICS):
        taken = poem.recipe("auto").fitted(batch_norm=has_batch_norm(net)).statistics
        if not has_batch_norm(net):
            raise ValueError(f"{net} has no batch norm, so that {row!r} is the row without {AUTO_STATISTICS.strip()}")
        found = replace(found, statistics=taken)
    return found


def fits(row: str, net: str) -> bool:
    """Whether a row is another than those beside it on a network, and can be made for it."""
    if row in TRANSFORMERS_ONLY:
        return "vit" in net
    return has_batch_norm(net) or not (row == "bn" or row.endswith(AUTO_STATISTICS))


def make(
    row: str,
    model: nn.Module,
    net: str,
    *,
    classes: list[int] | None,
    source_data: Tensor | None,
    seed: int,
    fast: Any,
    precision: Any,
) -> poem.Adapter:
    """A fresh adapter of a row; call it with images in [0, 1].

    Args:
        row: A name as this module has them.
        model: The network, borrowed.
        net: Its name in the zoo.
        classes: The data's classes among the logits; None for all.
        source_data: Clean images for rows that prepare themselves on some; others leave them alone.
        seed: Seed of the adapter's random numbers.
        fast: As `poem.adapt` takes it.
        precision: As `poem.adapt` takes it.
    """
    base, recipe = zoo.base(net), recipe_of(row, net)
    given = source_data if recipe.uses_source_data else None
    return poem.adapt(
        model, recipe, mean=base.mean, std=base.std, classes=classes, source_data=given, seed=seed, fast=fast,
        precision=precision, guard=False,
    )  # fmt: skip
