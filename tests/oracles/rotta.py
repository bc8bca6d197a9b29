"""RoTTA (Yuan et al., CVPR 2023): a student learns from a bank of images what a slow teacher predicts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor, nn

from oracles.common import Augment, Net, Outcome, adam, copied, everyone, moving, norm_tensors, step


class RobustNorm(nn.Module):
    """Batch norm whose own statistics take in a share of each batch that it is trained on."""

    def __init__(self, layer: nn.BatchNorm2d, alpha: float) -> None:
        super().__init__()
        assert layer.running_mean is not None
        assert layer.running_var is not None
        self.weight, self.bias, self.eps, self.alpha = layer.weight, layer.bias, layer.eps, alpha
        self.mean, self.var = layer.running_mean.clone(), layer.running_var.clone()
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.mean, self.var
        if self.training:
            mean = (1 - self.alpha) * mean + self.alpha * x.mean((0, 2, 3))
            var = (1 - self.alpha) * var + self.alpha * x.var((0, 2, 3), correction=0)
            self.mean, self.var = mean.detach(), var.detach()
        y = (x - mean[None, :, None, None]) / (var[None, :, None, None] + self.eps).sqrt()
        return y * self.weight[None, :, None, None] + self.bias[None, :, None, None]


def robust(net: nn.Module, alpha: float) -> Net:
    """A copy with such layers."""
    other = copied(net)
    for module in list(other.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, RobustNorm(child, alpha))
    return other


class Bank:
    """Per class a list of [image, uncertainty, age], oldest first."""

    def __init__(self, capacity: int, classes: int) -> None:
        self.capacity, self.classes = capacity, classes
        self.lists: list[list[list[Any]]] = [[] for _ in range(classes)]

    def score(self, uncertainty: float, age: int) -> float:
        return 1 / (1 + math.exp(-age / self.capacity)) + uncertainty / math.log(self.classes)

    def add(self, image: Tensor, label: int, uncertainty: float) -> None:
        if self.make_room(label, self.score(uncertainty, 0)):
            self.lists[label].append([image, uncertainty, 0])
        for held in self.lists:
            for item in held:
                item[2] += 1

    def make_room(self, label: int, newcomer: float) -> bool:
        sizes = [len(held) for held in self.lists]
        if sizes[label] < self.capacity / self.classes:
            if sum(sizes) < self.capacity:
                return True
            among = [index for index, size in enumerate(sizes) if size == max(sizes)]
        else:
            among = [label]
        worst, where = -math.inf, (-1, -1)
        for index in among:
            for place, (_, uncertainty, age) in enumerate(self.lists[index]):
                if self.score(uncertainty, age) >= worst:
                    worst, where = self.score(uncertainty, age), (index, place)
        if worst > newcomer:
            self.lists[where[0]].pop(where[1])
            return True
        return False

    def items(self) -> list[list[Any]]:
        return [item for held in self.lists for item in held]


def rotta(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    rng: Generator,
    augment: Augment,
    capacity: int = 64,
    every: int = 64,
    alpha: float = 0.05,
    nu: float = 0.001,
) -> Iterator[Outcome]:
    """The teacher answers before the update, of which a batch makes one if it passes a multiple of `every`."""
    student, teacher = robust(net, alpha), robust(net, alpha)
    theta, slow = moving_norms(student), moving_norms(teacher)
    optimizer, bank, count = adam(theta, lr), None, 0
    for x in batches:
        with torch.no_grad():
            answer = teacher(x)
        p = answer.softmax(1)
        bank = bank or Bank(capacity, p.shape[1])
        for image, row in zip(x, p, strict=True):
            bank.add(image, int(row.argmax()), float(-(row * (row + 1e-6).log()).sum()))
        due = count // every != (count + len(x)) // every
        count += len(x)
        if not due:
            yield Outcome(answer, ~everyone(x))
            continue
        images = torch.stack([item[0] for item in bank.items()])
        age = torch.tensor([item[2] / capacity for item in bank.items()], dtype=torch.float64)
        seen = augment(images, rng)
        learning(student, on=True)
        learning(teacher, on=True)
        with torch.no_grad():
            target = teacher(images).softmax(1)
        losses = -(target * student(seen).log_softmax(1)).sum(1)
        weight = (-age).exp() / (1 + (-age).exp())
        step(optimizer, torch.autograd.grad((weight * losses).mean(), theta))
        learning(student, on=False)
        learning(teacher, on=False)
        with torch.no_grad():
            for fast, mine in zip(theta, slow, strict=True):
                mine.copy_((1 - nu) * mine + nu * fast)
        yield Outcome(answer, everyone(x), [everyone(x)])


def learning(net: nn.Module, *, on: bool) -> None:
    """Switch the robust layers."""
    for module in net.modules():
        if isinstance(module, RobustNorm):
            module.training = on


def moving_norms(net: Net) -> list[nn.Parameter]:
    """Scale and shift of the robust layers, or of the other norm layers."""
    layers = [module for module in net.modules() if isinstance(module, RobustNorm)]
    tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    return moving(tensors or norm_tensors(net))
