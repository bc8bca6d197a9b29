"""Looking at a batch: a pass with the present weights, or with others, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from poem.engine.accounting import Costs
from poem.engine.network import Network
from poem.engine.norm_layers import Pass
from poem.engine.state import State
from poem.parts.base import Batch, Look
from poem.recipes.recipe import Recipe


@dataclass
class Looking:
    """Asks the network about one batch, for the loop and for parts that want another look."""

    recipe: Recipe
    network: Network
    state: State
    batch: Batch
    costs: Costs

    def __call__(
        self,
        images: Tensor | None = None,
        *,
        round: int = 0,
        grad: bool = True,
        theta: Tensor | None = None,
        needed: Tensor | None = None,
    ) -> Look:
        """One pass with the present weights, or with those given; counted as needed for everyone, or for some."""
        weights = (self.state.moving["theta"] if theta is None else theta).detach().requires_grad_(grad)
        zeta = self.state.moving["branch"].detach().requires_grad_(grad) if "branch" in self.state.moving else None

        def ask(images: Tensor, *, among: Tensor | None = None, grad: bool = False) -> Tensor:
            self._count(images, None if among is None else among.sum())
            with torch.set_grad_enabled(grad):
                return self._predict(images, weights, zeta, among)[0]

        shown = self.batch.images if images is None else images
        self._count(shown, needed)
        with torch.set_grad_enabled(grad):
            logits, heads, run = self._predict(shown, weights, zeta, None)
        look = Look(logits, heads, self.batch, ask, round, shown, run.features, weights, zeta, run.record)
        self.state.begin(look)
        return look

    def teacher(self) -> Tensor:
        """What the teacher says of this batch."""
        assert self.recipe.teacher is not None

        def says(weights: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
            def predict(images: Tensor) -> Tensor:
                self._count(images, None)
                with torch.no_grad():
                    return self._predict(images, weights["theta"], weights.get("branch"), None)[0]

            return predict

        return self.recipe.teacher.target(self.batch, says(self.state.teacher), says(self.state.source))

    def _predict(
        self, images: Tensor, theta: Tensor, zeta: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...], Pass]:
        """The logits that answer, each head's, and what the pass recorded."""
        moving = theta if theta.numel() else None
        heads, run = self.network.heads(images, moving, zeta, self.recipe.statistics, self.state.memory, mask)
        branch = self.recipe.branch
        return branch.together(*heads) if branch is not None and len(heads) == 2 else heads[0], heads, run

    def _count(self, images: Tensor, needed: Tensor | None) -> None:
        """Rows that a pass computes, and those that it was needed for."""
        twice = self.network.branch is not None and self.network.doubles is False
        self.costs.forwards_computed += (2 if twice else 1) * len(images)
        self.costs.forwards = self.costs.forwards + (len(images) if needed is None else needed)
