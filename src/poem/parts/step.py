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
from poem.parts.fields import NotNegative, Positive, Range, Share

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

    @property
    def per_sample(self) -> bool:
        """Whether `join` is to be given each sample's gradient; the network then has norm-affine rows per sample."""
        return False

    def for_group(self, group: str) -> Step:
        """The step of `theta`, of the `branch`, or of the tensors that parts bring: itself, or its optimiser."""
        return self if group == "theta" else self.optimiser

    def init(self, theta: Tensor) -> Memory:
        """The optimiser's memory of one group before its first step."""
        return {}

    def join(self, gradients: Tensor, mask: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """One gradient (P,) of the samples' (B, P), whose sum is the loss's, and the part of the memory that is new.

        `mask` (B,) tells which samples are selected; the loss is a mean over them.
        """
        return gradients.sum(0), {}

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
class Clipped(Step):
    """Limits the length of each sample's gradient before they are averaged: `mean_i g_i * min(1, C / |g_i|)`.

    `g_i` is the gradient of sample i's own weighted loss with respect to the norm layers' scale and shift, of one
    backward pass: in a pass that is learnt from, each sample has a row of scales and shifts of its own. The adapt
    branch is clipped by itself, since its loss is another. Terms of the loss without samples, such as `FisherAnchor`,
    are not clipped.

    C is `limit`, or by default a running median of `|g_i|` over the selected samples: the first batch's median, then
    multiplied in each update by `exp(rate * (share above - share below))`. It does not depend on the scale of the loss,
    and one outlier moves it no further than any other sample. Gradients of zero do not count.

    Exact where no sample depends on another (group and layer norm). With batch statistics, `g_i` is what the whole
    loss changes by the rows of sample i, which is an approximation: statistics couple the batch.

    Needs `parameters=NormAffine()` or other parameters of norm layers, and an objective that is a mean over the
    selected samples: not `SoftLikelihoodRatio`, which divides by the batch size. `SAM` is not supported.

    Paper: DP-TTA (ICML 2026, arXiv 2606.01908), its clipping alone.
    Reference code: none found.
    Differs: the paper's C is not known to us, so C is the running median; no noise is added.
    """

    base: Step = field(default_factory=SGD)
    limit: Positive | None = None
    rate: Share = 0.1

    def __post_init__(self) -> None:
        """Refuses steps whose gradient is not one average."""
        if isinstance(self.base, Step) and (self.base.perturbs or self.base.per_sample):
            raise ValueError(f"Clipped: expected a plain optimiser such as SGD() or Adam(), got {self.base!r}")

    @property
    def optimiser(self) -> Step:
        """The inner optimiser, for tensors that parts bring: these have no gradient of each sample."""
        return self.base

    @property
    def per_sample(self) -> bool:
        """Each sample's gradient is needed."""
        return True

    def for_group(self, group: str) -> Step:
        """The network's tensors and the branch's are clipped alike."""
        return self if group in ("theta", "branch") else self.base

    def init(self, theta: Tensor) -> Memory:
        """The inner optimiser's memory and, where C is not given, a median that is not known yet (0)."""
        return {**self.base.init(theta), **({} if self.limit is not None else {"median": theta.new_zeros(())})}

    def join(self, gradients: Tensor, mask: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """The sum of the shortened gradients, and the new median.

        Rows of samples that are not selected are zero, but for batch statistics, and are shortened too.
        """
        rows = mask.view(-1, 1) | gradients.isfinite()  # what a sample that is not selected lacks does not matter
        gradients = torch.where(rows, gradients, 0)
        norms = gradients.norm(dim=1) * mask.sum()  # of the sample's own loss, not of its share in the mean
        counts = mask & (norms > 0)
        median = _median(norms, counts)
        if self.limit is None:
            median = torch.where(memory["median"] > 0, memory["median"], median)
        limit = median if self.limit is None else torch.full_like(median, self.limit)
        factors = (limit / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)
        joined = (factors.view(-1, 1) * gradients).sum(0)
        if self.limit is not None:
            return joined, {}
        balance = torch.where(counts, (norms - median).sign(), 0).sum() / counts.sum().clamp(min=1)
        return joined, {"median": median * (self.rate * balance).exp()}

    def __call__(self, gradient: Tensor, lr: float, memory: Memory) -> tuple[Tensor, Memory]:
        """The inner optimiser's step."""
        return self.base(gradient, lr, memory)


def _median(values: Tensor, counts: Tensor) -> Tensor:
    """The median of the values (B,) that count, the lower of two; 0 where none does. Decided on the device."""
    ordered = torch.where(counts, values, torch.inf).sort().values
    middle = ordered.gather(0, ((counts.sum() - 1).clamp(min=0) // 2).view(1))[0]
    return torch.where(counts.any(), middle, 0)


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

    def __post_init__(self) -> None:
        """Refuses an inner step that needs each sample's gradient, which no second pass has."""
        if isinstance(self.base, Step) and self.base.per_sample:
            raise ValueError(f"SAM: expected a plain optimiser such as SGD() or Adam(), got {self.base!r}")

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
