"""SAR (Niu et al., ICLR 2023): sharpness-aware and reliable entropy minimisation, with a way back to the source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oracles.common import (
    Net,
    Outcome,
    averaged,
    below,
    entropy,
    norms_below_top,
    put_back,
    sgd,
    step,
    values,
    with_batch_statistics,
)
from oracles.host import Forward, Host


@torch.no_grad()
def climb(tensors: Sequence[Tensor], gradients: Sequence[Tensor], rho: float) -> None:
    """To the sharpest point within `rho`, with one norm over all tensors."""
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.add_(rho * gradient / (norm + 1e-12))


def sar(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    rho: float = 0.05,
    loss_floor: float = 0.2,
    optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer] = sgd,
) -> Iterator[Outcome]:
    """The gradient is taken at the sharpest point nearby; a low average loss leads back to the source."""
    student = with_batch_statistics(net)
    theta = norms_below_top(student)
    origin = values(theta)
    opt = optimizer(theta, lr)
    loss_average: Tensor | None = None
    for x in batches:
        logits = student(x)
        first = below(logits, 0.4)
        outcome = Outcome(logits.detach(), first)
        if first.any():
            before = values(theta)
            climb(theta, torch.autograd.grad(entropy(logits)[first].mean(), theta), rho)
            risen = student(x)
            second = first & below(risen, 0.4)
            if second.any():
                loss = entropy(risen)[second].mean()
                gradients = torch.autograd.grad(loss, theta)
                put_back(theta, before)
                step(opt, gradients)
                loss_average = averaged(loss_average, loss.detach())
                outcome.updates.append(second)
            else:
                put_back(theta, before)
        if loss_average is not None and loss_average < loss_floor:
            put_back(theta, origin)
            opt, loss_average, outcome.reset = optimizer(theta, lr), None, True
        yield outcome


def sar_coasting(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    rho: float = 0.05,
    loss_floor: float = 0.2,
    optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer] = sgd,
) -> Iterator[Outcome]:
    """SAR as its authors run it: nothing is skipped where no sample is selected.

    The mean over no sample is NaN, its gradient is zero, and the optimiser steps by its momentum.
    """
    student = with_batch_statistics(net)
    theta = norms_below_top(student)
    origin = values(theta)
    opt = optimizer(theta, lr)
    loss_average: Tensor | None = None
    for x in batches:
        logits = student(x)
        first = below(logits, 0.4)
        outcome = Outcome(logits.detach(), first)
        before = values(theta)
        climb(theta, torch.autograd.grad(entropy(logits)[first].mean(), theta), rho)
        risen = student(x)
        second = first & below(risen, 0.4)
        loss = entropy(risen)[second].mean()
        gradients = torch.autograd.grad(loss, theta)
        put_back(theta, before)
        step(opt, gradients)
        if second.any():
            loss_average = averaged(loss_average, loss.detach())
            outcome.updates.append(second)
        if loss_average is not None and loss_average < loss_floor:
            put_back(theta, origin)
            opt, loss_average, outcome.reset = optimizer(theta, lr), None, True
        yield outcome


class SARHost(Host):
    """SAR as a host: the forward pass after the climb gives the loss, for the branch too."""

    def __init__(self, *given: Any, loss_floor: float = 0.2, **more: Any) -> None:
        super().__init__(*given, **more)
        self.loss_floor = loss_floor
        self.loss_average: Tensor | None = None
        self.last_loss: Tensor | None = None

    def own_norms(self, net: Net) -> list[nn.Parameter]:
        return norms_below_top(net)

    def begin(self, x: Tensor) -> None:
        self.images, self.last_loss = x, None

    def select(self, now: Forward) -> Tensor:
        return below(now.scores, 0.4)

    def learn(self, now: Forward, chosen: Tensor) -> Tensor:
        before = values(self.theta)
        climb(self.theta, torch.autograd.grad(now.entropy[chosen].mean(), self.theta), 0.05)
        risen = self.forward(self.images)
        second = chosen & below(risen.scores, 0.4)
        if second.any():
            loss = risen.entropy[second].mean()
            gradients = self.gradients(loss, risen, second)
            put_back(self.theta, before)
            self.step(*gradients)
            self.last_loss = loss.detach()
        else:
            put_back(self.theta, before)
        return second

    def end(self) -> None:
        if self.last_loss is not None:
            self.loss_average = averaged(self.loss_average, self.last_loss)
            if self.loss_average < self.loss_floor:
                self.reset()
                self.loss_average = None
