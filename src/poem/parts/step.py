"""How does a gradient become an update?

All adapted numbers are one flat vector, so an optimiser is a few lines, and the new vector is a value: nothing changes
until the loop applies it. The learning rate is the recipe's: a number, or the `Rule` in `recipes/learning_rate.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from poem.parts.base import Memory, Part
from poem.parts.fields import NotNegative, Range, Share

Decay = Annotated[float, Range(at_least=0, below=1)]


@dataclass(frozen=True, repr=False)
class Step(Part):
    """Turns a gradient into a change."""

    @property
    def optimiser(self) -> Step:
        """The plain optimiser, which also steps the branch and the tensors that parts bring."""
        return self

    @property
    def perturbs(self) -> bool:
        """Whether the loss and its gradient are taken again at `theta + perturbation(gradient)`, and that one used."""
        return False

    @property
    def steps_when_empty(self) -> bool:
        """Whether a step with a zero gradient is made where no sample is selected, so that the momentum still acts."""
        return False

    def init(self, theta: Tensor) -> Memory:
        """The optimiser's memory of one group before its first step."""
        return {}

    def perturbation(self, gradient: Tensor) -> Tensor:
        """Where the gradient is taken again, relative to theta."""
        return torch.zeros_like(gradient)

    @abstractmethod
    def __call__(self, gradient: Tensor, lr: float, memory: Memory) -> tuple[Tensor, Memory]:
        """The change to add, and the new memory."""


@dataclass(frozen=True, repr=False)
class SGD(Step):
    """Stochastic gradient descent with momentum, as torch's (no dampening, no weight decay)."""

    momentum: Share = 0.9
    nesterov: bool = False

    def init(self, theta: Tensor) -> Memory:
        """No velocity."""
        return {"velocity": torch.zeros_like(theta)}

    def __call__(self, gradient: Tensor, lr: float, memory: Memory) -> tuple[Tensor, Memory]:
        """Along the velocity, or with Nesterov one step ahead of it."""
        velocity = self.momentum * memory["velocity"] + gradient
        direction = gradient + self.momentum * velocity if self.nesterov else velocity
        return -lr * direction, {"velocity": velocity}


@dataclass(frozen=True, repr=False)
class Adam(Step):
    """Adam as torch's, without weight decay."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: NotNegative = 1e-8

    def init(self, theta: Tensor) -> Memory:
        """No averages, no steps."""
        return {"mean": torch.zeros_like(theta), "square": torch.zeros_like(theta), "steps": theta.new_zeros(())}

    def __call__(self, gradient: Tensor, lr: float, memory: Memory) -> tuple[Tensor, Memory]:
        """Bias-corrected mean over bias-corrected deviation."""
        one, two = self.betas
        steps = memory["steps"] + 1
        mean = one * memory["mean"] + (1 - one) * gradient
        square = two * memory["square"] + (1 - two) * gradient.square()
        deviation = (square / (1 - two**steps)).sqrt() + self.eps
        return -lr * (mean / (1 - one**steps)) / deviation, {"mean": mean, "square": square, "steps": steps}


@dataclass(frozen=True, repr=False)
class SAM(Step):
    """Sharpness-aware: selects again at `radius` along the gradient, and steps by the gradient there.

    With `momentum_coast` a batch that selects no sample, in the first pass or in the second, is a step of the inner
    optimiser with a zero gradient, as in the published code. It is counted as no update, and the branch does not move.

    Paper: SAR (Niu et al., ICLR 2023), after Foret et al., ICLR 2021.
    Reference code: mr-eggplant/SAR (BSD-3).
    Differs: an empty selection steps nowhere unless `momentum_coast` is set; the inner optimiser is cleared by a reset.
    """

    radius: NotNegative = 0.05
    base: Step = field(default_factory=SGD)
    momentum_coast: bool = False

    @property
    def optimiser(self) -> Step:
        """The inner optimiser."""
        return self.base

    def init(self, theta: Tensor) -> Memory:
        """The inner optimiser's memory; the perturbation keeps none."""
        return self.base.init(theta)

    @property
    def perturbs(self) -> bool:
        """The gradient is always taken twice."""
        return True

    @property
    def steps_when_empty(self) -> bool:
        """As `momentum_coast` says."""
        return self.momentum_coast

    def perturbation(self, gradient: Tensor) -> Tensor:
        """`radius` along the gradient, one norm over all numbers."""
        length = gradient.square().sum().sqrt()
        return gradient * (self.radius / (length + 1e-12))

    def __call__(self, gradient: Tensor, lr: float, memory: Memory) -> tuple[Tensor, Memory]:
        """The inner optimiser's step, from the unperturbed theta."""
        return self.base(gradient, lr, memory)
