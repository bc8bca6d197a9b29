"""auto: ETA behind statistics of the stream on batch norm, ETA with POEM elsewhere, and a prior from the last images.

Written from `docs/methods/auto.md`. The network runs once for each choice of statistics, one pass after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oracles.common import Outcome, all_norms, averaged, copied, entropy, sgd, step
from oracles.eata import ETAHost, reliable_and_new, weighted_entropy
from oracles.host import Forward
from oracles.plus_poem import reselect, run

Optimizer = Callable[..., torch.optim.Optimizer]


@dataclass
class Moments:
    """A channel's mean and variance over a stream, those of the last batch, and how much batches vary.

    `images` were seen; `shares` are those of the batches so far in the mean.
    """

    mean: Tensor
    var: Tensor
    last_mean: Tensor
    last_var: Tensor
    mean_variation: Tensor | None = None
    var_variation: Tensor | None = None
    images: int = 0
    shares: tuple[float, ...] = ()


def together(mean: Tensor, var: Tensor, mean2: Tensor, var2: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Mean and variance of two populations in one, the second with this share."""
    both = (1 - share) * mean + share * mean2
    square = (1 - share) * (var + mean**2) + share * (var2 + mean2**2)
    return both, square - both**2


def variation(before: Tensor | None, now: Tensor, last: Tensor, error: Tensor) -> Tensor:
    """How much batches vary, as a squared error; at least that of the images in the batch."""
    if before is None:
        return error
    known, jump = torch.maximum(before, error), (now - last) ** 2 / 2
    slow = 0.9 * before + 0.1 * torch.minimum(jump, 9 * known)
    return torch.maximum(torch.where(known > 0, slow, jump), error)  # of single images only the jump is known


def excess(value: Tensor, origin: Tensor, error: Tensor) -> Tensor:
    """The origin, moved towards the value by what is beyond the error."""
    up, down = (value - origin - error).clamp(min=0), (origin - value - error).clamp(min=0)
    return origin + up - down


class StreamNorm(nn.Module):
    """A batch-norm layer with the source's statistics and the stream's, mixed; `use` chooses weight, rate and doubt."""

    def __init__(self, norm: nn.BatchNorm2d, copies: int) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.mean, self.var = norm.running_mean.clone(), norm.running_var.clone()
        self.held = [Moments(self.mean, self.var, self.mean, self.var) for _ in range(copies)]
        self.seen = list(self.held)
        self.use = (0, 0.0, 0.0, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        copy, weight, rate, doubt = self.use
        if doubt > 0 and len(x) == 1 and self.held[copy].mean_variation is None:
            weight = 0.0  # how far one image is from the truth is unknown
        before = self.held[copy].images
        rate = max(min(1.0, rate * len(x) / 64), len(x) / (512 + before + len(x)))
        seen = self.moved(self.held[copy], x.detach(), rate)
        self.seen[copy] = seen
        assert seen.mean_variation is not None
        assert seen.var_variation is not None
        share = math.fsum(each**2 for each in seen.shares)
        mean = excess(seen.mean, self.mean, doubt * (share * seen.mean_variation).sqrt())
        var = excess(seen.var, self.var, doubt * (share * seen.var_variation).sqrt())
        mean, var = together(self.mean, self.var, mean, var, weight)
        normal = (x - mean[:, None, None]) / (var[:, None, None] + self.eps).sqrt()
        return normal * self.weight[:, None, None] + self.bias[:, None, None]

    def moved(self, held: Moments, x: Tensor, rate: float) -> Moments:
        """The stream's moments with one more batch."""
        each = x.mean((2, 3))
        mean = each.mean(0)
        spread = ((x - mean[:, None, None]) ** 2).mean((2, 3))
        var = spread.mean(0)
        below = max(len(x) - 1, 1)
        mean_error, var_error = ((each - mean) ** 2).mean(0) / below, ((spread - var) ** 2).mean(0) / below
        new_mean, new_var = together(held.mean, held.var, mean, var, rate)
        return Moments(
            new_mean, new_var, mean, var, variation(held.mean_variation, mean, held.last_mean, mean_error),
            variation(held.var_variation, var, held.last_var, var_error), held.images + len(x),
            (*((1 - rate) * share for share in held.shares), rate),
        )  # fmt: skip

    def keep(self) -> None:
        """The batch is over."""
        self.held = list(self.seen)


def with_stream_statistics(net: nn.Module, copies: int) -> list[StreamNorm]:
    """Puts a layer of ours in the place of every batch norm."""
    found = []
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                found.append(StreamNorm(child, copies))
                setattr(parent, name, found[-1])
    return found


class Recent:
    """A mean over about the last so many images, exact until there were so many."""

    def __init__(self, horizon: int) -> None:
        self.horizon, self.seen, self.mean = horizon, 0, torch.zeros(())

    def moved(self, values: Tensor) -> Tensor:
        """With the mean over a batch's rows in it."""
        share = max(len(values) / (self.seen + len(values)), min(1.0, len(values) / self.horizon))
        return (1 - share) * self.mean.to(values) + share * values.mean(0)

    def keep(self, values: Tensor) -> None:
        """Moves the mean."""
        self.mean, self.seen = self.moved(values), self.seen + len(values)


class Runs:
    """How much likelier neighbours in the stream agree than images further apart."""

    def __init__(self) -> None:
        self.recent, self.before = Recent(64), Recent(512)
        self.near = self.far = 0.0

    def now(self, chances: Tensor) -> tuple[float, float, float]:
        """The ratio with a batch in it, and the two averages."""
        if self.before.seen == 0:
            return 1.5, 0.0, 0.0
        count, wanted = len(chances), max(0, 64 - len(chances))
        near = far = 0.0
        for row in range(count):
            others = [chances[other] for other in range(count) if other != row]
            beside = torch.stack([*others, torch.zeros_like(chances[0])]).sum(0) + wanted * self.recent.mean
            near += float((chances[row] * beside).sum()) / max(1, count - 1 + wanted) / count
            far += float((chances[row] * self.before.mean).sum()) / count
        step = min(1.0, count / 256) if self.far > 0 else 1.0
        near, far = self.near + step * (near - self.near), self.far + step * (far - self.far)
        return (near / far if far > 0 else 1.5), near, far

    def keep(self, chances: Tensor) -> None:
        """The batch is over."""
        _, self.near, self.far = self.now(chances)
        self.recent.keep(chances)
        self.before.keep(chances)


class Blend:
    """The copies' probabilities averaged, those that tell the images apart with most weight, few quick ones in runs."""

    def __init__(self, copies: int, trust: float, horizon: int, caution: float = 5.0) -> None:
        self.trust, self.caution, self.slow_runs, self.half_runs = trust, caution, Runs(), Runs()
        self.predictions, self.entropies = ([Recent(horizon) for _ in range(copies)] for _ in range(2))

    def __call__(self, each: list[Tensor]) -> Tensor:
        informed = []
        for logits, predictions, entropies in zip(each, self.predictions, self.entropies, strict=True):
            mean = predictions.moved(logits.softmax(1).detach())
            gained = -(mean * mean.log()).sum() - entropies.moved(entropy(logits).detach())
            informed.append(gained / math.log(logits.shape[1]))
        scores = [self.trust * each for each in informed]  # source, a quarter and half of the batch, the batch, slow
        scores[3] = min(scores[3] + 1.0, max(scores))
        slow, half = (
            self.slow_runs.now(each[4].softmax(1).detach())[0],
            self.half_runs.now(each[2].softmax(1).detach())[0],
        )
        runs = min(slow, 1 + 4 * (half - 1))
        for quick in (1, 2, 3):
            scores[quick] = scores[quick] - self.caution * max(0.0, runs - 1.3)
        weights = torch.stack(scores).softmax(0)
        chances = torch.stack([weight * logits.softmax(1) for weight, logits in zip(weights, each, strict=True)])
        return chances.sum(0).log()

    def keep(self, each: list[Tensor]) -> None:
        """The batch is over."""
        for logits, predictions, entropies in zip(each, self.predictions, self.entropies, strict=True):
            predictions.keep(logits.softmax(1).detach())
            entropies.keep(entropy(logits).detach())
        self.slow_runs.keep(each[4].softmax(1).detach())
        self.half_runs.keep(each[2].softmax(1).detach())


class LastImages:
    """Which classes the last images say to expect, beyond their share in the stream."""

    def __init__(self, power: float, horizon: int) -> None:
        self.power, self.near, self.far = power, Recent(64), Recent(horizon)

    def __call__(self, scores: Tensor) -> Tensor:
        log_p = scores.log_softmax(1)
        if self.far.seen == 0:
            return log_p
        count = max(len(scores), 64)
        near, far = self.smooth(self.near.moved(log_p.exp()), count), self.smooth(self.far.mean, count)
        return log_p + self.power * (near.log() - far.log())

    @staticmethod
    def smooth(mean: Tensor, count: int) -> Tensor:
        """ROID's smoothing."""
        extra = max(1 / count, 1 / len(mean)) / mean.max()
        return (mean + extra) / (1 + extra * len(mean))

    def keep(self, scores: Tensor) -> None:
        """The batch is over."""
        for recent in (self.near, self.far):
            recent.keep(scores.softmax(1))


def on_batch_norm(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    learn: bool = True,
    redundancy: float = 0.05,
    weights: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 1.0),
    rates: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 0.05),
    doubts: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 3.0),
    optimizer: Optimizer = sgd,
) -> Iterator[Outcome]:
    """The mean of several passes, each with statistics of its own; with `learn`, ETA on it."""
    student = copied(net)
    theta = all_norms(student)
    layers = with_stream_statistics(student, len(weights))
    blend, prior = Blend(len(weights), 10.0, 256), LastImages(2.0, 1024)
    steps, average = optimizer(theta, lr), None
    for x in batches:
        each: list[Tensor] = []
        for copy, (weight, rate, doubt) in enumerate(zip(weights, rates, doubts, strict=True)):
            for layer in layers:
                layer.use = copy, weight, rate, doubt
            each.append(student(x))
        scores = blend(each)
        chosen = reliable_and_new(scores, average, redundancy) if learn else torch.zeros(len(x), dtype=torch.bool)
        outcome = Outcome(prior(scores.detach()), chosen)
        if chosen.any():
            step(steps, torch.autograd.grad(weighted_entropy(scores, chosen), theta))
            average = averaged(average, scores.softmax(1)[chosen].mean(0).detach())
            outcome.updates.append(chosen)
        blend.keep(each)
        prior.keep(scores.detach())
        for layer in layers:
            layer.keep()
        yield outcome


class AutoHost(ETAHost):
    """ETA with POEM's exploration and branch, smaller updates where few are selected, answered with the prior."""

    def __init__(self, *given: Any, size: int, least: float, optimizer: Optimizer = sgd, **more: Any) -> None:
        self.optimizer, self.prior, self.fewest = optimizer, LastImages(2.0, 1024), least * size
        super().__init__(*given, **more)

    def gradients(self, loss: Tensor, now: Forward, chosen: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Where fewer than `fewest` are selected, both are multiplied by their number divided by it."""
        share = min(1.0, int(chosen.sum()) / self.fewest) if self.fewest else 1.0
        theta, zeta = super().gradients(loss, now, chosen)
        return [share * each for each in theta], [share * each for each in zeta]

    def start_optimizers(self) -> None:
        self.theta_sgd, self.zeta_sgd = self.optimizer(self.theta, self.lr), self.optimizer(self.zeta, self.lr)

    def answer(self, now: Forward) -> Tensor:
        scores = now.scores.detach()
        answer = self.prior(scores)
        self.prior.keep(scores)
        return answer


def auto(net: nn.Module, batches: list[Tensor], *, least: float = 0.5, **settings: Any) -> Iterator[Outcome]:
    """Which of the two depends on the network's norm layers."""
    if any(isinstance(module, nn.BatchNorm2d) for module in net.modules()):
        return on_batch_norm(net, batches, learn=False, **settings)
    return run(AutoHost(net, branch=True, size=len(batches[0]), least=least, **settings), reselect, batches)
