"""Which tensors may move?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from poem.engine.anatomy import Anatomy, is_norm
from poem.parts.base import Part


@dataclass(frozen=True, repr=False)
class Parameters(Part):
    """Names the parameters that a recipe may move."""

    def __call__(self, model: nn.Module, anatomy: Anatomy) -> list[str]:
        """Names of parameters, in the order of `model.named_parameters()`."""
        return []


@dataclass(frozen=True, repr=False)
class Nothing(Parameters):
    """No tensor moves: the method only reads (source, bn, lame)."""


@dataclass(frozen=True, repr=False)
class NormAffine(Parameters):
    """Scale and shift of the normalisation layers.

    `top` says what happens to the layers nearest the answer: `"included"`, or `"excluded"` as SAR, DeYO and POEM do
    (the last stage, or the last quarter of equal blocks, and every norm layer after them).

    Paper: Tent (Wang et al., ICLR 2021); the exclusion: SAR (Niu et al., ICLR 2023).
    Differs: layers are found by the network's shape; published code looks for substrings of names.
    """

    top: Literal["included", "excluded"] = "included"

    def __call__(self, model: nn.Module, anatomy: Anatomy) -> list[str]:
        """Parameters held directly by norm modules, less those of the top where it is excluded."""
        left_out = set(anatomy.top) if self.top == "excluded" else set()
        wanted = {
            id(parameter)
            for name, module in model.named_modules()
            if is_norm(module) and name not in left_out
            for parameter in module.parameters(recurse=False)
        }
        return [name for name, parameter in model.named_parameters() if id(parameter) in wanted]


@dataclass(frozen=True, repr=False)
class Everything(Parameters):
    """Every parameter, or with `only="weight-and-bias"` those that a module calls weight or bias.

    Paper: MEMO (Zhang et al., NeurIPS 2022) moves all; CoTTA (Wang et al., CVPR 2022) moves weights and biases, so
    that class tokens and position embeddings stay.
    """

    only: Literal["all", "weight-and-bias"] = "all"

    def __call__(self, model: nn.Module, anatomy: Anatomy) -> list[str]:
        """All floating-point parameters, filtered by their last name."""
        names = [name for name, parameter in model.named_parameters() if parameter.is_floating_point()]
        if self.only == "weight-and-bias":
            names = [name for name in names if name.rpartition(".")[2] in ("weight", "bias")]
        return names
