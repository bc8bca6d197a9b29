"""MEMO (Zhang et al., NeurIPS 2022): one image at a time, the entropy of the mean prediction over its views."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from oracles.common import (
    Augment,
    Net,
    Outcome,
    branch_norms,
    copied,
    deep_part,
    everyone,
    mixed,
    modules_beyond_split,
    moving,
    shallow_part,
    step,
    without,
)


class PriorNorm(nn.Module):
    """BN under source statistics, with one part in 17 of the batch's, through which no gradient flows."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.weight, self.bias, self.eps, self.share = norm.weight, norm.bias, norm.eps, 1 / 17
        self.source_mean, self.source_var = norm.running_mean, norm.running_var

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = (1 - self.share) * self.source_mean + self.share * x.mean((0, 2, 3))
            var = (1 - self.share) * self.source_var + self.share * x.var((0, 2, 3), unbiased=True)
        shape = (1, -1, 1, 1)
        normal = (x - mean.view(shape)) / (var.view(shape) + self.eps).sqrt()
        return normal * self.weight.view(shape) + self.bias.view(shape)


def into_prior_norms(student: Net) -> Net:
    """The same net, its BN layers replaced; their weights and biases stay the same tensors."""
    for module in list(student.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, PriorNorm(child))
    return student


def marginal_entropy(scores: Tensor) -> Tensor:
    """The entropy of the mean probabilities over all views."""
    mean = scores.log_softmax(1).logsumexp(0) - math.log(len(scores))
    return -(mean.exp() * mean).sum()


def memo(
    net: nn.Module, batches: list[Tensor], *, lr: float, rng: Generator, views: Augment, updates: int = 1
) -> Iterator[Outcome]:
    """Plain SGD steps over all parameters, then the image's answer; every image starts from the source."""
    for x in batches:
        rows = []
        for image in x.split(1):
            student = into_prior_norms(copied(net))
            theta = moving(list(student.parameters()))
            optimizer = torch.optim.SGD(theta, lr=lr)
            seen = views(image, rng)
            for _ in range(updates):
                loss = marginal_entropy(student(seen))
                step(optimizer, torch.autograd.grad(loss, theta))
            rows.append(student(image).detach())
        yield Outcome(torch.cat(rows), everyone(x), [everyone(x)] * updates)


def memo_repeated(
    net: nn.Module, batches: list[Tensor], *, lr: float, rng: Generator, views: Augment
) -> Iterator[Outcome]:
    """memo*: two updates per image on the same views."""
    yield from memo(net, batches, lr=lr, rng=rng, views=views, updates=2)


def memo_with_branch(
    net: nn.Module, batches: list[Tensor], *, lr: float, rng: Generator, views: Augment
) -> Iterator[Outcome]:
    """memo+poem and memo+poem-ii: all below the split learns from the entropy, the branch from the cross-entropy.

    Every view is selected, so a second selection would find the same set, and one update is made.
    """
    for x in batches:
        rows = []
        for image in x.split(1):
            main, side = copied(net), copied(net)
            theta, zeta = moving(without(list(main.parameters()), modules_beyond_split(main))), branch_norms(side)
            main, side = into_prior_norms(main), into_prior_norms(side)
            seen = views(image, rng)
            features = shallow_part(main, seen)
            branch_logits = deep_part(side, features)
            scores = mixed(deep_part(main, features), branch_logits)
            branch_loss = cross_entropy(branch_logits, scores.argmax(1))
            zeta_gradients = torch.autograd.grad(branch_loss, zeta, retain_graph=True)
            theta_gradients = torch.autograd.grad(marginal_entropy(scores), theta)
            step(torch.optim.SGD(theta, lr=lr), theta_gradients)
            step(torch.optim.SGD(zeta, lr=lr), zeta_gradients)
            features = shallow_part(main, image)
            rows.append(mixed(deep_part(main, features), deep_part(side, features)).detach())
        yield Outcome(torch.cat(rows), everyone(x), [everyone(x)])
