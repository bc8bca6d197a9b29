"""CoTTA (Wang et al., CVPR 2022): a student follows a slow teacher; single weights return to the source by chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from oracles.common import (
    Augment,
    Net,
    Outcome,
    branch_norms,
    deep_part,
    everyone,
    mixed,
    modules_beyond_split,
    moving,
    sgd,
    shallow_part,
    step,
    values,
    with_batch_statistics,
    without,
)


def weights_and_biases(net: Net) -> list[nn.Parameter]:
    """Every tensor of such a name: of the transformer all but its class token and positions."""
    return [tensor for name, tensor in net.named_parameters() if name.endswith((".weight", ".bias"))]


def agreement(target: Tensor, scores: Tensor) -> Tensor:
    """Mean symmetric cross-entropy between the teacher's prediction and the student's."""
    there = -(target.softmax(1) * scores.log_softmax(1)).sum(1)
    back = -(scores.softmax(1) * target.log_softmax(1)).sum(1)
    return (0.5 * there + 0.5 * back).mean()


def unsure(anchor: Net, x: Tensor, p_th: float) -> bool:
    """Whether the source network's mean confidence is below `p_th`, so that the teacher needs augmented copies."""
    with torch.no_grad():
        return bool(anchor(x).softmax(1).max(1).values.mean() < p_th)


@torch.no_grad()
def follow(slow: Sequence[Tensor], fast: Sequence[Tensor], teacher_memory: float) -> None:
    """The teacher is an average of the student over time."""
    for teacher, student in zip(slow, fast, strict=True):
        teacher.copy_(teacher_memory * teacher + (1 - teacher_memory) * student)


@torch.no_grad()
def restored(tensors: Sequence[Tensor], origin: Sequence[Tensor], rng: Generator, chance: float) -> None:
    """Every number returns to its source value with this chance; one draw over all of them."""
    draw = torch.rand(sum(tensor.numel() for tensor in tensors), generator=rng) < chance
    for tensor, value, back in zip(tensors, origin, draw.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(torch.where(back.view(tensor.shape), value, tensor))


def cotta(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    rng: Generator,
    augment: Augment,
    p_th: float = 0.1,
    copies: int = 32,
    restore: float = 0.001,
    teacher_memory: float = 0.999,
) -> Iterator[Outcome]:
    """The teacher answers, before the update: where the source is unsure, the mean logits of augmented copies."""
    student, teacher, anchor = with_batch_statistics(net), with_batch_statistics(net), with_batch_statistics(net)
    theta = moving(weights_and_biases(student))
    origin = values(theta)
    optimizer = sgd(theta, lr, nesterov=True)
    for x in batches:
        with torch.no_grad():
            seen = [augment(x, rng) for _ in range(copies)] if unsure(anchor, x, p_th) else [x]
            target = torch.stack([teacher(each) for each in seen]).mean(0)
        step(optimizer, torch.autograd.grad(agreement(target, student(x)), theta))
        follow(list(teacher.parameters()), list(student.parameters()), teacher_memory)
        restored(theta, origin, rng, restore)
        yield Outcome(target, everyone(x), [everyone(x)])


def cotta_from_student(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    rng: Generator,
    augment: Augment,
    p_th: float = 0.1,
    copies: int = 32,
    restore: float = 0.001,
    teacher_memory: float = 0.999,
    updates: int = 1,
) -> Iterator[Outcome]:
    """cotta+poem-i: the student answers, after the update. Everyone is selected, so a new selection is the same set."""
    student, teacher, anchor = with_batch_statistics(net), with_batch_statistics(net), with_batch_statistics(net)
    theta, slow = moving(weights_and_biases(student)), weights_and_biases(teacher)
    origin = values(theta)
    optimizer = sgd(theta, lr, nesterov=True)
    for x in batches:
        with torch.no_grad():
            seen = [augment(x, rng) for _ in range(copies)] if unsure(anchor, x, p_th) else [x]
            target = torch.stack([teacher(each) for each in seen]).mean(0)
        for _ in range(updates):
            step(optimizer, torch.autograd.grad(agreement(target, student(x)), theta))
        answer = student(x).detach()
        follow(slow, theta, teacher_memory)
        restored(theta, origin, rng, restore)
        yield Outcome(answer, everyone(x), [everyone(x)] * updates)


def cotta_repeated(net: nn.Module, batches: list[Tensor], **settings: Any) -> Iterator[Outcome]:
    """cotta*: two updates towards the same target."""
    yield from cotta_from_student(net, batches, updates=2, **settings)


def cotta_with_branch(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    rng: Generator,
    augment: Augment,
    p_th: float = 0.1,
    copies: int = 32,
    restore: float = 0.001,
    teacher_memory: float = 0.999,
) -> Iterator[Outcome]:
    """cotta+poem and cotta+poem-ii: student and teacher have a branch each; both groups follow and are restored."""
    main, side, anchor = with_batch_statistics(net), with_batch_statistics(net), with_batch_statistics(net)
    slow_main, slow_side = with_batch_statistics(net), with_batch_statistics(net)
    theta = moving(without(weights_and_biases(main), modules_beyond_split(main)))
    slow_theta = without(weights_and_biases(slow_main), modules_beyond_split(slow_main))
    zeta, slow_zeta = in_order(side, branch_norms(side)), in_order(slow_side, branch_norms(slow_side))
    theta_origin, zeta_origin = values(theta), values(zeta)
    theta_sgd, zeta_sgd = sgd(theta, lr, nesterov=True), sgd(zeta, lr, nesterov=True)
    for x in batches:
        with torch.no_grad():
            seen = [augment(x, rng) for _ in range(copies)] if unsure(anchor, x, p_th) else [x]
            target = torch.stack([both_heads(slow_main, slow_side, each)[0] for each in seen]).mean(0)
        scores, branch_logits = both_heads(main, side, x)
        theta_gradients = torch.autograd.grad(agreement(target, scores), theta, retain_graph=True)
        zeta_gradients = torch.autograd.grad(cross_entropy(branch_logits, scores.argmax(1)), zeta)
        step(theta_sgd, theta_gradients)
        step(zeta_sgd, zeta_gradients)
        answer = both_heads(main, side, x)[0].detach()
        follow(slow_theta, theta, teacher_memory)
        follow(slow_zeta, zeta, teacher_memory)
        restored(theta, theta_origin, rng, restore)
        restored(zeta, zeta_origin, rng, restore)
        yield Outcome(answer, everyone(x), [everyone(x)])


def both_heads(main: Net, side: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the heads' mean probabilities, and the branch's own logits."""
    features = shallow_part(main, x)
    branch_logits = deep_part(side, features)
    return mixed(deep_part(main, features), branch_logits), branch_logits


def in_order(net: Net, tensors: list[nn.Parameter]) -> list[nn.Parameter]:
    """The tensors as `named_parameters` lists them, which is the order of the draw."""
    wanted = {id(tensor) for tensor in tensors}
    return [tensor for _, tensor in net.named_parameters() if id(tensor) in wanted]
