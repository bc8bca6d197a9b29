"""Straight-line references for every method: slow, obvious, one batch after the other, nothing shared or clever.

``answers`` runs a method over a list of batches and returns what the model answers to each. Nothing is shared with the
library. Thresholds named "margin" are multiples of ln C. Chance comes from one CPU generator per run.

Options (a name that a method does not know is a ``TypeError``; a method's name stands for its +poem and * forms too):

| option          | default                    | methods                  | meaning                                    |
|-----------------|----------------------------|--------------------------|--------------------------------------------|
| parameters      | all / top-excluded         | all that move norms      | which norm affine tensors may move         |
| optimizer       | sgd                        | all that learn, not memo | sgd or adam                                |
| momentum        | 0.9                        | same                     | of SGD                                     |
| nesterov        | False; roid, cotta True    | same                     | of SGD                                     |
| answer          | first; poem, +poem, * last | all that move norms      | the look that answers: first or last       |
| threshold       | 0.4; deyo 0.5; tent None   | all with an entropy test | margin of the selection; None: everyone    |
| weights         | True                       | eta                      | False: every sample counts alike           |
| weight_margin   | 0.4                        | eta, deyo, official      | margin in exp(margin ln C - H)             |
| redundancy      | 0.05; poem-official 0.2    | eta, official            | cosine below; None: no test (v2)           |
| memory          | 0.9                        | eta, roid, official      | momentum of the average prediction         |
| fisher_weight   | 2000                       | eata                     | of the Fisher anchor (needs ``source``)    |
| reset_every     | 1000                       | rdumb                    | calls between two resets                   |
| rho             | 0.05                       | sar                      | radius of the perturbation                 |
| momentum_coast  | False                      | sar, without a suffix    | True: nobody teaches, the momentum moves   |
| loss_floor      | 0.2                        | sar, official            | reset when the loss average is below       |
| loss_memory     | 0.9                        | same                     | momentum of the loss average               |
| plpd            | 0.2                        | deyo, official           | pseudo-label probability difference above  |
| entropy_weight  | True                       | deyo                     | False: without exp(margin ln C - H)        |
| plpd_weight     | True                       | deyo                     | False: without exp(PLPD)                   |
| temperature     | 1/3                        | roid                     | of the weights                             |
| keep            | 0.99                       | roid                     | share kept when averaged with the source   |
| clip            | 0.99                       | roid                     | upper bound of a probability in the ratio  |
| consistency     | True                       | roid                     | False: without the augmented pass          |
| rounds          | 2; poem-ii 1               | poem, official, +poem, * | most updates per batch (memo: per image)   |
| alpha           | 0.5                        | all with a branch        | share of the source branch in the mixture  |
| branch          | True                       | poem                     | False: no branch, answers logits           |
| first_threshold | = threshold; v2 0.5        | official                 | margin of the first selection              |
| prior           | 16                         | memo                     | source counts N/(N+1) in BN statistics     |
| p_th            | 0.1                        | cotta                    | anchor confidence below: augmented teacher |
| copies          | 32                         | cotta                    | augmented copies                           |
| restore         | 0.001                      | cotta                    | chance of an element to return             |
| teacher_memory  | 0.999                      | cotta                    | momentum of the teacher                    |
| neighbours      | 5                          | lame                     | k of the affinity's bandwidth              |
| steps           | 100                        | lame                     | most fixed-point iterations                |

In memo and cotta everyone teaches, so +poem and +poem-i make one update whatever ``rounds`` is; only * makes more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from nets import ConvNet, Transformer
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

Augment = Callable[[Tensor, Generator], Tensor]
Net = ConvNet | Transformer

BASES = ("tent", "tent-filtered", "eta", "eata", "sar", "deyo", "roid", "rdumb")
WHOLE = ("memo", "cotta")  # bases in which everything learns and everyone teaches
VARIANTS = ("+poem", "+poem-i", "+poem-ii", "*")
METHODS = (
    *("source", "bn", "tent", "tent-filtered", "eta", "eata", "sar", "deyo", "roid", "memo", "cotta", "rdumb", "lame"),
    *("poem", "poem-official", "poem-official-v2"),
    *(base + variant for base in (*BASES, *WHOLE) for variant in VARIANTS),
)


@dataclass
class Record:
    """One batch of a run: the first selection and the set that teaches in each update made."""

    selected: Tensor
    taught: list[Tensor] = field(default_factory=list)
    reset: bool = False


Trace = list[Record] | None


# ---------------------------------------------------------------------------------------------------- small helpers


def entropy(logits: Tensor) -> Tensor:
    """Entropy of each row in nats; log-probabilities are logits too."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def copied(net: nn.Module) -> Net:
    """A frozen deep copy in eval mode with its own running statistics."""
    other = copy.deepcopy(net).eval()
    assert isinstance(other, ConvNet | Transformer)
    for parameter in other.parameters():
        parameter.requires_grad_(False)
    return other


def with_batch_statistics(net: nn.Module) -> Net:
    """A frozen deep copy whose BN layers have no running statistics, so that eval mode uses the batch's."""
    other = copied(net)
    for module in other.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = None
            module.running_var = None
    return other


def norm_tensors(module: nn.Module) -> list[nn.Parameter]:
    """Weight and bias of every norm layer inside."""
    tensors: list[nn.Parameter] = []
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
            tensors += [part.weight, part.bias]
    return tensors


def without(tensors: list[nn.Parameter], modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The tensors that belong to none of the modules."""
    dropped = {id(parameter) for module in modules for parameter in module.parameters()}
    return [tensor for tensor in tensors if id(tensor) not in dropped]


def theta_of(net: Net, parameters: str, branch: bool) -> list[nn.Parameter]:
    """The norm tensors that may move: all or top-excluded, with a branch only those before the split."""
    if parameters not in ("all", "top-excluded"):
        raise ValueError(f"expected all or top-excluded, got {parameters!r}")
    theta = norm_tensors(net)
    if parameters == "top-excluded":
        top = [net.layer4] if isinstance(net, ConvNet) else [net.blocks[6], net.blocks[7], net.norm]
        theta = without(theta, top)
    if branch:
        deep = [net.layer4] if isinstance(net, ConvNet) else [net.blocks[7], net.norm]
        theta = without(theta, deep)
    for tensor in theta:
        tensor.requires_grad_(True)
    return theta


def zeta_of(branch: Net) -> list[nn.Parameter]:
    """The norm tensors of the branch, which is the deep part of a second copy of the net."""
    deep = [branch.layer4] if isinstance(branch, ConvNet) else [branch.blocks[7], branch.norm]
    zeta = [tensor for module in deep for tensor in norm_tensors(module)]
    for tensor in zeta:
        tensor.requires_grad_(True)
    return zeta


def shallow_part(net: Net, x: Tensor) -> Tensor:
    """The features at the split."""
    if isinstance(net, ConvNet):
        x = torch.relu(net.norm1(net.conv1(x)))
        return net.layer3(net.layer2(net.layer1(x)))  # type: ignore[no-any-return]
    tokens = net.patch(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([net.token.expand(len(x), -1, -1), tokens], dim=1) + net.position
    for i in range(7):
        tokens = net.blocks[i](tokens)
    return tokens  # type: ignore[no-any-return]


def deep_part(net: Net, features: Tensor) -> Tensor:
    """The logits from the features at the split."""
    if isinstance(net, ConvNet):
        return net.fc(net.layer4(features).mean((2, 3)))  # type: ignore[no-any-return]
    return net.head(net.norm(net.blocks[7](features))[:, 0])  # type: ignore[no-any-return]


def mixed(source_logits: Tensor, branch_logits: Tensor, alpha: float) -> Tensor:
    """Log of ``alpha p_source + (1 - alpha) p_branch``."""
    if alpha == 1:
        return source_logits.log_softmax(1)
    if alpha == 0:
        return branch_logits.log_softmax(1)
    parts = [source_logits.log_softmax(1) + math.log(alpha), branch_logits.log_softmax(1) + math.log(1 - alpha)]
    return torch.stack(parts).logsumexp(0)


def optimizer_of(tensors: list[nn.Parameter], lr: float, kind: str, momentum: float, nesterov: bool) -> Any:
    """SGD or Adam over the tensors."""
    if kind == "adam":
        return torch.optim.Adam(tensors, lr=lr)
    if kind == "sgd":
        return torch.optim.SGD(tensors, lr=lr, momentum=momentum, nesterov=nesterov)
    raise ValueError(f"expected sgd or adam, got {kind!r}")


def update(optimizer: Any, tensors: list[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    """One step of the optimiser with the given gradients."""
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def values(tensors: list[nn.Parameter]) -> list[Tensor]:
    """Copies of the present values."""
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def put_back(tensors: list[nn.Parameter], old: list[Tensor]) -> None:
    """Sets the tensors to earlier values."""
    for tensor, value in zip(tensors, old, strict=True):
        tensor.copy_(value)


@torch.no_grad()
def perturb(tensors: list[nn.Parameter], gradients: Sequence[Tensor], rho: float) -> None:
    """Moves the tensors by ``rho`` along the gradient, with one norm over all of them."""
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.add_(rho * gradient / (norm + 1e-12))


@torch.no_grad()
def pull(tensors: list[nn.Parameter], source: list[Tensor], keep: float) -> None:
    """Averages the tensors with their source values."""
    for tensor, value in zip(tensors, source, strict=True):
        tensor.copy_(keep * tensor + (1 - keep) * value)


def shuffled(x: Tensor, generator: Generator) -> Tensor:
    """Each image with the tiles of its 4 x 4 grid permuted on its own."""
    order = torch.rand(len(x), 16, generator=generator).argsort(dim=1)
    size = x.shape[-1] // 4
    result = torch.empty_like(x)
    for i in range(len(x)):
        for k in range(16):
            row, column = k // 4 * size, k % 4 * size
            j = int(order[i, k])
            from_row, from_column = j // 4 * size, j % 4 * size
            tile = x[i, :, from_row : from_row + size, from_column : from_column + size]
            result[i, :, row : row + size, column : column + size] = tile
    return result


def fall_of(clean: Tensor, destroyed: Tensor) -> Tensor:
    """PLPD: how much the probability of the predicted class falls, row by row."""
    label = clean.argmax(1)
    rows = torch.arange(len(label))
    return clean[rows, label] - destroyed[rows, label]


def cosine(average: Tensor, probabilities: Tensor) -> Tensor:
    """Cosine between the average prediction and each row."""
    length: Tensor = probabilities.norm(dim=1) * average.norm()
    return (probabilities * average).sum(1) / length


def averaged(old: Tensor | None, new: Tensor, momentum: float) -> Tensor:
    """Exponential average that starts with its first value."""
    return new if old is None else momentum * old + (1 - momentum) * new


def stretched(value: Tensor) -> Tensor:
    """Min-max normalised; ones if all are equal."""
    low, high = value.min(), value.max()
    return torch.ones_like(value) if high - low < 1e-12 else (value - low) / (high - low)


def prior_corrected(scores: Tensor, probabilities: Tensor) -> Tensor:
    """Scores times the smoothed mean prediction of the batch."""
    size, classes = scores.shape
    prior = probabilities.mean(0)
    smooth = max(1 / size, 1 / classes) / prior.max()
    return scores * (prior + smooth) / (1 + smooth * classes)


def fisher_of(net: nn.Module, parameters: str, branch: bool, source: list[Tensor]) -> list[Tensor]:
    """Mean over batches of the squared gradient of the batch's mean cross-entropy to its own predictions."""
    plain = with_batch_statistics(net)
    theta = theta_of(plain, parameters, branch)
    total = [torch.zeros_like(tensor) for tensor in theta]
    for x in source:
        logits = plain(x)
        loss = cross_entropy(logits, logits.argmax(1))
        for amount, gradient in zip(total, torch.autograd.grad(loss, theta), strict=True):
            amount += gradient**2
    return [amount / len(source) for amount in total]


def note(trace: Trace, record: Record) -> None:
    """Keeps the record if somebody asks for it."""
    if trace is not None:
        trace.append(record)


# ------------------------------------------------------------------------------------------------- methods, one each


@torch.no_grad()
def source_answers(net: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """The net as it comes."""
    still = copied(net)
    return [still(x) for x in batches]


@torch.no_grad()
def bn_answers(net: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """The net under batch statistics."""
    still = with_batch_statistics(net)
    return [still(x) for x in batches]


def tent_answers(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    trace: Trace = None,
    threshold: float | None = None,
    parameters: str = "all",
    answer: str = "first",
    optimizer: str = "sgd",
    momentum: float = 0.9,
    nesterov: bool = False,
) -> list[Tensor]:
    """Tent; with a threshold only samples of low entropy teach."""
    student = with_batch_statistics(net)
    theta = theta_of(student, parameters, branch=False)
    sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
    result = []
    for x in batches:
        logits = student(x)
        everyone = torch.ones(len(x), dtype=torch.bool)
        chosen = everyone if threshold is None else entropy(logits) < threshold * math.log(logits.shape[1])
        record = Record(chosen)
        if chosen.any():
            loss = entropy(logits)[chosen].mean()
            update(sgd, theta, torch.autograd.grad(loss, theta))
            record.taught.append(chosen)
        result.append(logits.detach() if answer == "first" else student(x).detach())
        note(trace, record)
    return result


def eta_answers(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    trace: Trace = None,
    source: list[Tensor] | None = None,
    reset_every: int | None = None,
    threshold: float = 0.4,
    weights: bool = True,
    weight_margin: float = 0.4,
    redundancy: float | None = 0.05,
    memory: float = 0.9,
    fisher_weight: float = 2000.0,
    parameters: str = "all",
    answer: str = "first",
    optimizer: str = "sgd",
    momentum: float = 0.9,
    nesterov: bool = False,
) -> list[Tensor]:
    """ETA; with source batches EATA; with ``reset_every`` RDumb."""
    student = with_batch_statistics(net)
    theta = theta_of(student, parameters, branch=False)
    anchor = values(theta)
    fisher = None if source is None else fisher_of(net, parameters, False, source)
    sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
    average: Tensor | None = None
    result = []
    for call, x in enumerate(batches):
        record = Record(torch.zeros(len(x), dtype=torch.bool))
        if reset_every is not None and call > 0 and call % reset_every == 0:
            put_back(theta, anchor)
            sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
            average = None
            record.reset = True
        logits = student(x)
        probabilities = logits.softmax(1).detach()
        uncertainty = entropy(logits)
        chosen = uncertainty < threshold * math.log(logits.shape[1])
        if average is not None and redundancy is not None:
            chosen = chosen & (cosine(average, probabilities).abs() < redundancy)
        record.selected = chosen
        if chosen.any():
            kept = uncertainty[chosen]
            weight = (weight_margin * math.log(logits.shape[1]) - kept.detach()).exp()
            loss = (weight * kept).mean() if weights else kept.mean()
            if fisher is not None:
                for tensor, importance, origin in zip(theta, fisher, anchor, strict=True):
                    loss = loss + fisher_weight * (importance * (tensor - origin) ** 2).sum()
            update(sgd, theta, torch.autograd.grad(loss, theta))
            average = averaged(average, probabilities[chosen].mean(0), memory)
            record.taught.append(chosen)
        result.append(logits.detach() if answer == "first" else student(x).detach())
        note(trace, record)
    return result


def sar_answers(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    trace: Trace = None,
    threshold: float = 0.4,
    rho: float = 0.05,
    momentum_coast: bool = False,
    loss_floor: float | None = 0.2,
    loss_memory: float = 0.9,
    parameters: str = "top-excluded",
    answer: str = "first",
    optimizer: str = "sgd",
    momentum: float = 0.9,
    nesterov: bool = False,
) -> list[Tensor]:
    """SAR: the gradient is taken at the sharpest point nearby, low losses lead back to the source.

    With ``momentum_coast`` nothing is skipped where nobody teaches, at the first look or at the second: the mean over
    nobody is NaN, its gradient is zero, and the optimiser steps by its momentum.
    """
    student = with_batch_statistics(net)
    theta = theta_of(student, parameters, branch=False)
    origin = values(theta)
    sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
    loss_average: Tensor | None = None
    result = []
    for x in batches:
        logits = student(x)
        limit = threshold * math.log(logits.shape[1])
        first = entropy(logits) < limit
        record = Record(first)
        if first.any() or momentum_coast:
            before = values(theta)
            loss1 = entropy(logits)[first].mean()
            perturb(theta, torch.autograd.grad(loss1, theta), rho)
            logits2 = student(x)
            second = first & (entropy(logits2) < limit)
            if second.any() or momentum_coast:
                loss2 = entropy(logits2)[second].mean()
                gradients = torch.autograd.grad(loss2, theta)
                put_back(theta, before)
                update(sgd, theta, gradients)
            else:
                put_back(theta, before)
            if second.any():
                loss_average = averaged(loss_average, loss2.detach(), loss_memory)
                record.taught.append(second)
        result.append(logits.detach() if answer == "first" else student(x).detach())
        if loss_average is not None and loss_floor is not None and loss_average < loss_floor:
            put_back(theta, origin)
            sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
            loss_average = None
            record.reset = True
        note(trace, record)
    return result


def deyo_answers(
    net: nn.Module,
    batches: list[Tensor],
    generator: Generator,
    *,
    lr: float,
    trace: Trace = None,
    threshold: float = 0.5,
    weight_margin: float = 0.4,
    plpd: float = 0.2,
    entropy_weight: bool = True,
    plpd_weight: bool = True,
    parameters: str = "top-excluded",
    answer: str = "first",
    optimizer: str = "sgd",
    momentum: float = 0.9,
    nesterov: bool = False,
) -> list[Tensor]:
    """DeYO: samples teach whose prediction is certain and suffers when the patches are shuffled."""
    student = with_batch_statistics(net)
    theta = theta_of(student, parameters, branch=False)
    sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
    result = []
    for x in batches:
        destroyed = shuffled(x, generator)
        logits = student(x)
        uncertainty = entropy(logits)
        reliable = uncertainty < threshold * math.log(logits.shape[1])
        record = Record(torch.zeros(len(x), dtype=torch.bool))
        if reliable.any():
            with torch.no_grad():
                fall = fall_of(logits[reliable].softmax(1), student(destroyed[reliable]).softmax(1))
            inside = fall > plpd
            record.selected[reliable] = inside
            if inside.any():
                kept = uncertainty[reliable][inside]
                weight = torch.zeros_like(kept).detach()
                if entropy_weight:
                    weight = weight + (weight_margin * math.log(logits.shape[1]) - kept.detach()).exp()
                if plpd_weight:
                    weight = weight + fall[inside].exp()
                loss = (weight * kept).mean()
                update(sgd, theta, torch.autograd.grad(loss, theta))
                record.taught.append(record.selected)
        result.append(logits.detach() if answer == "first" else student(x).detach())
        note(trace, record)
    return result


def roid_answers(
    net: nn.Module,
    batches: list[Tensor],
    generator: Generator,
    *,
    lr: float,
    augment: Augment | None,
    batch_size: int | None = None,
    trace: Trace = None,
    memory: float = 0.9,
    temperature: float = 1 / 3,
    keep: float = 0.99,
    clip: float = 0.99,
    consistency: bool = True,
    parameters: str = "all",
    answer: str = "first",
    optimizer: str = "sgd",
    momentum: float = 0.9,
    nesterov: bool = True,
) -> list[Tensor]:
    """ROID: diverse and certain samples teach by a soft likelihood ratio and by consistency."""
    if augment is None:
        raise ValueError("roid needs augment")
    student = with_batch_statistics(net)
    theta = theta_of(student, parameters, branch=False)
    origin = values(theta)
    sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
    size = len(batches[0]) if batch_size is None else batch_size
    average: Tensor | None = None
    result = []
    for x in batches:
        augmented = augment(x, generator)
        logits = student(x)
        probabilities = logits.softmax(1)
        if average is None:
            average = torch.full_like(probabilities[0], 1 / logits.shape[1]).detach()
        with torch.no_grad():
            diversity = stretched(1 - cosine(average, probabilities))
            certainty = stretched(-entropy(logits))
            chosen = ~(diversity < diversity.mean())
            weight = (diversity * certainty / temperature).exp()[chosen]
            average = averaged(average, probabilities.mean(0), memory)
        ratio = probabilities[chosen].clamp(0, clip)
        slr = -(ratio * (ratio / (1 - ratio) + 1e-5).log()).sum(1)
        loss = (weight * slr).sum() / size
        if consistency:
            clean, other = logits[chosen], student(augmented[chosen])
            sce = -0.5 * (clean.softmax(1) * other.log_softmax(1)).sum(1)
            sce = sce - 0.5 * (other.softmax(1) * clean.log_softmax(1)).sum(1)
            loss = loss + (weight * sce).sum() / size
        update(sgd, theta, torch.autograd.grad(loss, theta))
        if answer == "last":
            logits = student(x)
        result.append(prior_corrected(logits, logits.softmax(1)).detach())
        pull(theta, origin, keep)
        note(trace, Record(chosen, [chosen]))
    return result


class PriorNorm(nn.Module):
    """BN under source statistics mixed with the batch's, through which no gradient flows."""

    def __init__(self, norm: nn.BatchNorm2d, share: float) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.weight, self.bias, self.eps, self.share = norm.weight, norm.bias, norm.eps, share
        self.source_mean, self.source_var = norm.running_mean, norm.running_var

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = (1 - self.share) * self.source_mean + self.share * x.mean((0, 2, 3))
            var = (1 - self.share) * self.source_var + self.share * x.var((0, 2, 3), unbiased=True)
        shape = (1, -1, 1, 1)
        normal = (x - mean.view(shape)) / (var.view(shape) + self.eps).sqrt()
        return normal * self.weight.view(shape) + self.bias.view(shape)


def memo_answers(
    net: nn.Module,
    batches: list[Tensor],
    generator: Generator,
    *,
    lr: float,
    views: Augment | None,
    trace: Trace = None,
    prior: float = 16,
) -> list[Tensor]:
    """MEMO: one step on the entropy of the mean prediction over views of one image, then back to the source."""
    if views is None:
        raise ValueError("memo needs views")
    result = []
    for x in batches:
        rows = []
        for i in range(len(x)):
            student = copied(net)
            for module in list(student.modules()):
                for name, child in list(module.named_children()):
                    if isinstance(child, nn.BatchNorm2d):
                        setattr(module, name, PriorNorm(child, 1 / (prior + 1)))
            for parameter in student.parameters():
                parameter.requires_grad_(True)
            log_p = student(views(x[i : i + 1], generator)).log_softmax(1)
            mean = log_p.logsumexp(0) - math.log(len(log_p))
            loss = -(mean.exp() * mean).sum()
            sgd = torch.optim.SGD(student.parameters(), lr=lr)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            with torch.no_grad():
                rows.append(student(x[i : i + 1]))
        result.append(torch.cat(rows))
        everyone = torch.ones(len(x), dtype=torch.bool)
        note(trace, Record(everyone, [everyone]))
    return result


def cotta_answers(
    net: nn.Module,
    batches: list[Tensor],
    generator: Generator,
    *,
    lr: float,
    augment: Augment | None,
    trace: Trace = None,
    p_th: float = 0.1,
    copies: int = 32,
    restore: float = 0.001,
    teacher_memory: float = 0.999,
    optimizer: str = "sgd",
    momentum: float = 0.9,
    nesterov: bool = True,
) -> list[Tensor]:
    """CoTTA: the student follows a slow teacher, which answers; single weights return to the source by chance."""
    student, teacher, anchor = with_batch_statistics(net), with_batch_statistics(net), with_batch_statistics(net)
    named = [(name, tensor) for name, tensor in student.named_parameters() if name.endswith((".weight", ".bias"))]
    theta = [tensor for _, tensor in named]
    for tensor in theta:
        tensor.requires_grad_(True)
    origin = values(theta)
    sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
    result = []
    for x in batches:
        logits = student(x)
        with torch.no_grad():
            if anchor(x).softmax(1).max(1).values.mean() < p_th:
                if augment is None:
                    raise ValueError("cotta needs augment when the anchor is unsure")
                target = torch.stack([teacher(augment(x, generator)) for _ in range(copies)]).mean(0)
            else:
                target = teacher(x)
        forth = -(target.softmax(1) * logits.log_softmax(1)).sum(1)
        back = -(logits.softmax(1) * target.log_softmax(1)).sum(1)
        loss = (0.5 * forth + 0.5 * back).mean()
        update(sgd, theta, torch.autograd.grad(loss, theta))
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.copy_(teacher_memory * slow + (1 - teacher_memory) * fast)
            draw = torch.rand(sum(tensor.numel() for tensor in theta), generator=generator) < restore
            start = 0
            for tensor, value in zip(theta, origin, strict=True):
                mask = draw[start : start + tensor.numel()].view(tensor.shape)
                tensor[mask] = value[mask]
                start += tensor.numel()
        result.append(target)
        everyone = torch.ones(len(x), dtype=torch.bool)
        note(trace, Record(everyone, [everyone]))
    return result


@torch.no_grad()
def lame_answers(net: nn.Module, batches: list[Tensor], *, neighbours: int = 5, steps: int = 100) -> list[Tensor]:
    """LAME: predictions of near samples attract each other; answers log-probabilities.

    The bandwidth reads the k-th smallest distance, each sample's own 0 counted, and with fewer than k samples the
    largest. One or two samples, and a bandwidth of 0 (equal images), leave the plain log-probabilities.
    """
    still = copied(net)
    result = []
    for x in batches:
        features = shallow_part(still, x)
        if isinstance(still, ConvNet):
            features, last = still.layer4(features).mean((2, 3)), still.fc
        else:
            features, last = still.norm(still.blocks[7](features))[:, 0], still.head
        logits = last(features)
        features = features / features.norm(dim=1, keepdim=True)
        distance = (features[:, None] - features[None, :]).norm(dim=2)
        k = neighbours if len(x) > neighbours else len(x)
        bandwidth = distance.sort(dim=1).values[:, k - 1].mean()
        if bandwidth == 0 or len(x) <= 2:
            result.append(logits.log_softmax(1))
            continue
        affinity = (-(distance**2) / (2 * bandwidth**2)).exp()
        unary = -(logits.softmax(1) + 1e-10).log()
        log_y = (-unary).log_softmax(1)
        old_energy = math.inf
        for step in range(steps):
            pairwise = affinity @ log_y.exp()
            log_y = (pairwise - unary).log_softmax(1)
            y = log_y.exp()
            energy = float((unary * y - pairwise * y + y * y.clamp(min=1e-20).log()).sum())
            if step > 1 and abs(energy - old_energy) <= 1e-8 * abs(old_energy):
                break
            old_energy = energy
        result.append(log_y)
    return result


def poem_answers(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    trace: Trace = None,
    threshold: float = 0.4,
    rounds: int = 2,
    alpha: float = 0.5,
    branch: bool = True,
    parameters: str = "top-excluded",
    answer: str = "last",
    optimizer: str = "sgd",
    momentum: float = 0.9,
    nesterov: bool = False,
) -> list[Tensor]:
    """POEM, Algorithm 1: select, teach the shallow norms and the branch, look again, until the set stands still."""
    main, side = with_batch_statistics(net), with_batch_statistics(net)
    theta, zeta = theta_of(main, parameters, branch), zeta_of(side)
    theta_sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
    zeta_sgd = optimizer_of(zeta, lr, optimizer, momentum, nesterov)
    result = []
    for x in batches:
        features = shallow_part(main, x)
        source_logits, branch_logits = deep_part(main, features), deep_part(side, features)
        scores = mixed(source_logits, branch_logits, alpha) if branch else source_logits
        first_scores = scores
        chosen = entropy(scores) < threshold * math.log(scores.shape[1])
        previous: Tensor | None = None
        record = Record(chosen)
        for _ in range(rounds):
            if not chosen.any() or (previous is not None and torch.equal(chosen, previous)):
                break
            previous = chosen
            theta_loss = entropy(scores)[chosen].mean()
            theta_gradients = torch.autograd.grad(theta_loss, theta, retain_graph=True)
            if branch:
                zeta_loss = cross_entropy(branch_logits[chosen], scores.argmax(1)[chosen])
                update(zeta_sgd, zeta, torch.autograd.grad(zeta_loss, zeta))
            update(theta_sgd, theta, theta_gradients)
            record.taught.append(chosen)
            features = shallow_part(main, x)
            source_logits, branch_logits = deep_part(main, features), deep_part(side, features)
            scores = mixed(source_logits, branch_logits, alpha) if branch else source_logits
            chosen = entropy(scores) < threshold * math.log(scores.shape[1])
        result.append((first_scores if answer == "first" else scores).detach())
        note(trace, record)
    return result


def poem_official_answers(
    net: nn.Module,
    batches: list[Tensor],
    generator: Generator,
    *,
    lr: float,
    trace: Trace = None,
    threshold: float = 0.4,
    first_threshold: float | None = None,
    weight_margin: float = 0.4,
    plpd: float = 0.2,
    redundancy: float | None = 0.2,
    memory: float = 0.9,
    loss_floor: float | None = 0.2,
    loss_memory: float = 0.9,
    rounds: int = 2,
    alpha: float = 0.5,
    parameters: str = "top-excluded",
    answer: str = "last",
    optimizer: str = "sgd",
    momentum: float = 0.9,
    nesterov: bool = False,
) -> list[Tensor]:
    """POEM as its authors run it, repaired: mean of logits, PLPD and redundancy tests, DeYO weights at first."""
    main, side = with_batch_statistics(net), with_batch_statistics(net)
    theta, zeta = theta_of(main, parameters, branch=True), zeta_of(side)
    theta_origin, zeta_origin = values(theta), values(zeta)
    theta_sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
    zeta_sgd = optimizer_of(zeta, lr, optimizer, momentum, nesterov)
    average: Tensor | None = None
    loss_average: Tensor | None = None

    def look(x: Tensor) -> tuple[Tensor, Tensor]:
        features = shallow_part(main, x)
        source_logits, branch_logits = deep_part(main, features), deep_part(side, features)
        return alpha * source_logits + (1 - alpha) * branch_logits, branch_logits

    result = []
    for x in batches:
        destroyed = shuffled(x, generator)
        combined, branch_logits = look(x)
        first_combined = combined
        margin = threshold if first_threshold is None else first_threshold
        previous: Tensor | None = None
        first_loss: Tensor | None = None
        lesson: Tensor | None = None
        record = Record(torch.zeros(len(x), dtype=torch.bool))
        for turn in range(rounds):
            uncertainty = entropy(combined)
            reliable = uncertainty < margin * math.log(combined.shape[1])
            chosen = reliable.clone()
            fall = torch.zeros_like(uncertainty).detach()
            if reliable.any():
                with torch.no_grad():
                    fall[reliable] = fall_of(combined[reliable].softmax(1), look(destroyed[reliable])[0].softmax(1))
                chosen = reliable & (fall > plpd)
            if average is not None and redundancy is not None:
                chosen = chosen & (cosine(average, combined.softmax(1).detach()).abs() < redundancy)
            if turn == 0:
                record.selected = chosen
            if not chosen.any() or (previous is not None and torch.equal(chosen, previous)):
                break
            previous = chosen
            kept = uncertainty[chosen]
            if turn == 0:
                weight = (weight_margin * math.log(combined.shape[1]) - kept.detach()).exp() + fall[chosen].exp()
                theta_loss = (weight * kept).mean()
                first_loss = theta_loss.detach()
            else:
                theta_loss = kept.mean()
            zeta_loss = cross_entropy(branch_logits[chosen], combined.argmax(1)[chosen])
            theta_gradients = torch.autograd.grad(theta_loss, theta, retain_graph=True)
            zeta_gradients = torch.autograd.grad(zeta_loss, zeta)
            update(theta_sgd, theta, theta_gradients)
            update(zeta_sgd, zeta, zeta_gradients)
            lesson = combined.softmax(1)[chosen].mean(0).detach()
            record.taught.append(chosen)
            combined, branch_logits = look(x)
            margin = threshold
        result.append((first_combined if answer == "first" else combined).detach())
        if lesson is not None:
            average = averaged(average, lesson, memory)
        if first_loss is not None:
            loss_average = averaged(loss_average, first_loss, loss_memory)
        if loss_average is not None and loss_floor is not None and loss_average < loss_floor:
            put_back(theta, theta_origin)
            put_back(zeta, zeta_origin)
            theta_sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
            zeta_sgd = optimizer_of(zeta, lr, optimizer, momentum, nesterov)
            average, loss_average = None, None
            record.reset = True
        note(trace, record)
    return result


# ------------------------------------------------------------------------------------- BASE+poem, -i, -ii and BASE*


@dataclass
class Look:
    """A pass over the batch: scores answer (logits, with a branch log-probabilities), the rest is derived."""

    scores: Tensor
    branch_logits: Tensor | None

    @property
    def log_p(self) -> Tensor:
        return self.scores.log_softmax(1)

    @property
    def p(self) -> Tensor:
        return self.scores.softmax(1)

    @property
    def entropy(self) -> Tensor:
        return entropy(self.scores)


def extended_answers(
    base: str,
    variant: str,
    net: nn.Module,
    batches: list[Tensor],
    generator: Generator,
    *,
    lr: float,
    augment: Augment | None = None,
    batch_size: int | None = None,
    source: list[Tensor] | None = None,
    trace: Trace = None,
    rounds: int | None = None,
    alpha: float = 0.5,
    threshold: float | None = None,
    weights: bool = True,
    weight_margin: float = 0.4,
    redundancy: float | None = 0.05,
    memory: float = 0.9,
    fisher_weight: float = 2000.0,
    reset_every: int = 1000,
    rho: float = 0.05,
    loss_floor: float | None = 0.2,
    loss_memory: float = 0.9,
    plpd: float = 0.2,
    entropy_weight: bool = True,
    plpd_weight: bool = True,
    temperature: float = 1 / 3,
    keep: float = 0.99,
    clip: float = 0.99,
    consistency: bool = True,
    parameters: str | None = None,
    answer: str = "last",
    optimizer: str = "sgd",
    momentum: float = 0.9,
    nesterov: bool | None = None,
) -> list[Tensor]:
    """A base with a branch (+poem-ii), with re-selection (+poem-i), with both (+poem) or just repeated (*)."""
    if base not in BASES or variant not in VARIANTS:
        raise ValueError(f"expected one of {BASES} and one of {VARIANTS}, got {base!r} and {variant!r}")
    if base == "roid" and augment is None:
        raise ValueError("roid needs augment")
    with_branch = variant in ("+poem", "+poem-ii")
    frozen_set = variant == "*"
    rounds = (1 if variant == "+poem-ii" else 2) if rounds is None else rounds
    everyone_teaches = base == "tent" and frozen_set and threshold is None
    threshold = (0.5 if base == "deyo" else 0.4) if threshold is None else threshold
    parameters = ("top-excluded" if base in ("sar", "deyo") else "all") if parameters is None else parameters
    nesterov = base == "roid" if nesterov is None else nesterov
    size = len(batches[0]) if batch_size is None else batch_size

    main, side = with_batch_statistics(net), with_batch_statistics(net)
    theta, zeta = theta_of(main, parameters, with_branch), zeta_of(side)
    theta_origin, zeta_origin = values(theta), values(zeta)
    fisher = fisher_of(net, parameters, with_branch, source) if base == "eata" and source is not None else None
    theta_sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
    zeta_sgd = optimizer_of(zeta, lr, optimizer, momentum, nesterov)
    average: Tensor | None = None
    loss_average: Tensor | None = None

    def look(x: Tensor) -> Look:
        features = shallow_part(main, x)
        if not with_branch:
            return Look(deep_part(main, features), None)
        branch_logits = deep_part(side, features)
        return Look(mixed(deep_part(main, features), branch_logits, alpha), branch_logits)

    def falls(now: Look, reliable: Tensor, destroyed: Tensor) -> Tensor:
        """PLPD of the reliable samples by a pass over them alone; below every threshold elsewhere."""
        result = torch.full_like(now.entropy, -2.0).detach()
        if reliable.any():
            with torch.no_grad():
                result[reliable] = fall_of(now.p[reliable], look(destroyed[reliable]).p)
        return result

    result = []
    for call, x in enumerate(batches):
        record = Record(torch.zeros(len(x), dtype=torch.bool))
        if base == "rdumb" and call > 0 and call % reset_every == 0:
            put_back(theta, theta_origin)
            put_back(zeta, zeta_origin)
            theta_sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
            zeta_sgd = optimizer_of(zeta, lr, optimizer, momentum, nesterov)
            average = None
            record.reset = True
        destroyed = shuffled(x, generator) if base == "deyo" else x
        augmented = augment(x, generator) if base == "roid" and augment is not None else x

        now = first = look(x)
        limit = threshold * math.log(now.scores.shape[1])
        if base == "roid" and average is None:
            average = torch.full_like(now.p[0], 1 / now.scores.shape[1]).detach()
        chosen = previous = torch.zeros(len(x), dtype=torch.bool)
        reliable = torch.zeros(len(x), dtype=torch.bool)
        lesson: Tensor | None = None
        last_loss: Tensor | None = None

        for turn in range(rounds):
            # Which samples teach?
            if turn == 0 or not frozen_set:
                if everyone_teaches:
                    chosen = torch.ones(len(x), dtype=torch.bool)
                elif base in ("tent", "tent-filtered", "sar"):
                    chosen = now.entropy < limit
                elif base in ("eta", "eata", "rdumb"):
                    chosen = now.entropy < limit
                    if average is not None and redundancy is not None:
                        chosen = chosen & (cosine(average, now.p.detach()).abs() < redundancy)
                elif base == "deyo":
                    reliable = now.entropy < limit
                    chosen = reliable & (falls(now, reliable, destroyed) > plpd)
                elif base == "roid":
                    assert average is not None
                    diversity = stretched(1 - cosine(average, now.p.detach()))
                    chosen = ~(diversity < diversity.mean())
            if turn == 0:
                record.selected = chosen
            if not chosen.any():
                break
            if turn > 0 and not frozen_set and torch.equal(chosen, previous):
                break
            previous = chosen

            # What do they minimise?
            teacher, taught, before = now, chosen, values(theta)
            if base in ("tent", "tent-filtered"):
                loss = now.entropy[chosen].mean()
            elif base in ("eta", "eata", "rdumb"):
                kept = now.entropy[chosen]
                weight = (weight_margin * math.log(now.scores.shape[1]) - kept.detach()).exp()
                loss = (weight * kept).mean() if weights else kept.mean()
                if fisher is not None:
                    for tensor, importance, origin in zip(theta, fisher, theta_origin, strict=True):
                        loss = loss + fisher_weight * (importance * (tensor - origin) ** 2).sum()
            elif base == "sar":
                loss1 = now.entropy[chosen].mean()
                perturb(theta, torch.autograd.grad(loss1, theta), rho)
                teacher = look(x)
                taught = chosen & (teacher.entropy < limit)
                if not taught.any():
                    put_back(theta, before)
                    break
                loss = teacher.entropy[taught].mean()
            elif base == "deyo":
                kept = now.entropy[chosen]
                # A repeated look's pass serves the weights alone, so it runs over those who teach.
                fall = falls(now, chosen if frozen_set and turn > 0 else reliable, destroyed)[chosen]
                weight = torch.zeros_like(kept).detach()
                if entropy_weight:
                    weight = weight + (weight_margin * math.log(now.scores.shape[1]) - kept.detach()).exp()
                if plpd_weight:
                    weight = weight + fall.exp()
                loss = (weight * kept).mean()
            else:
                assert average is not None
                diversity = stretched(1 - cosine(average, now.p.detach()))
                certainty = stretched(-now.entropy.detach())
                weight = (diversity * certainty / temperature).exp()[chosen]
                ratio = now.p[chosen].clamp(0, clip)
                slr = -(ratio * (ratio / (1 - ratio) + 1e-5).log()).sum(1)
                loss = (weight * slr).sum() / size
                if consistency:
                    other = look(augmented[chosen])
                    sce = -0.5 * (now.p[chosen] * other.log_p).sum(1) - 0.5 * (other.p * now.log_p[chosen]).sum(1)
                    loss = loss + (weight * sce).sum() / size

            # Both gradients come from the same look, then both groups step.
            theta_gradients = torch.autograd.grad(loss, theta, retain_graph=True)
            zeta_gradients: Sequence[Tensor] = []
            if teacher.branch_logits is not None:
                label = teacher.scores.argmax(1)
                branch_loss = cross_entropy(teacher.branch_logits[taught], label[taught])
                zeta_gradients = torch.autograd.grad(branch_loss, zeta)
            put_back(theta, before)
            update(theta_sgd, theta, theta_gradients)
            if with_branch:
                update(zeta_sgd, zeta, zeta_gradients)
            record.taught.append(taught)
            last_loss = loss.detach()
            lesson = teacher.p.mean(0).detach() if base == "roid" else teacher.p[taught].mean(0).detach()
            now = look(x)

        # The answer, then what is remembered.
        final = first if answer == "first" else now
        scores = final.scores.detach()
        if base == "roid":
            if with_branch:
                scores = scores - scores.mean(1, keepdim=True)
            scores = prior_corrected(scores, final.p.detach())
        result.append(scores)
        if base in ("eta", "eata", "rdumb", "roid") and lesson is not None:
            average = averaged(average, lesson, memory)
        if base == "roid":
            pull(theta, theta_origin, keep)
            if with_branch:
                pull(zeta, zeta_origin, keep)
        if base == "sar" and last_loss is not None:
            loss_average = averaged(loss_average, last_loss, loss_memory)
            if loss_floor is not None and loss_average < loss_floor:
                put_back(theta, theta_origin)
                put_back(zeta, zeta_origin)
                theta_sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
                zeta_sgd = optimizer_of(zeta, lr, optimizer, momentum, nesterov)
                loss_average = None
                record.reset = True
        note(trace, record)
    return result


# ----------------------------------------------------------- memo and cotta with +poem, -i, -ii and *: everyone teaches


def parts_of(net: Net) -> list[nn.Module]:
    """Every module from the split on."""
    return [net.layer4, net.fc] if isinstance(net, ConvNet) else [net.blocks[7], net.norm, net.head]


def updates_of(variant: str, rounds: int | None) -> int:
    """Updates made where everyone teaches: re-selection finds the same set, so only * makes more than one."""
    if variant not in VARIANTS:
        raise ValueError(f"expected one of {VARIANTS}, got {variant!r}")
    rounds = 2 if rounds is None else rounds
    return rounds if variant == "*" else min(rounds, 1)


def memo_extended_answers(
    variant: str,
    net: nn.Module,
    batches: list[Tensor],
    generator: Generator,
    *,
    lr: float,
    views: Augment | None,
    trace: Trace = None,
    prior: float = 16,
    rounds: int | None = None,
    alpha: float = 0.5,
) -> list[Tensor]:
    """MEMO with a branch (+poem, +poem-ii), with re-selection of everyone (+poem-i) or repeated (*)."""
    if views is None:
        raise ValueError("memo needs views")
    updates = updates_of(variant, rounds)
    with_branch = variant in ("+poem", "+poem-ii")
    result = []
    for x in batches:
        rows = []
        for i in range(len(x)):
            # Everything starts from the source. The side's shallow part is never used.
            main, side = copied(net), copied(net)
            theta = list(main.parameters())
            if with_branch:
                theta = without(theta, parts_of(main))
            for tensor in theta:
                tensor.requires_grad_(True)
            zeta = zeta_of(side)
            for student in (main, side):
                for module in list(student.modules()):
                    for name, child in list(module.named_children()):
                        if isinstance(child, nn.BatchNorm2d):
                            setattr(module, name, PriorNorm(child, 1 / (prior + 1)))
            theta_sgd = torch.optim.SGD(theta, lr=lr)
            zeta_sgd = torch.optim.SGD(zeta, lr=lr)

            image = x[i : i + 1]
            seen = views(image, generator)
            for _ in range(updates):
                features = shallow_part(main, seen)
                scores = deep_part(main, features)
                zeta_gradients: Sequence[Tensor] = []
                if with_branch:
                    branch_logits = deep_part(side, features)
                    scores = mixed(scores, branch_logits, alpha)
                    branch_loss = cross_entropy(branch_logits, scores.argmax(1))
                    zeta_gradients = torch.autograd.grad(branch_loss, zeta, retain_graph=True)
                mean = scores.log_softmax(1).logsumexp(0) - math.log(len(seen))
                loss = -(mean.exp() * mean).sum()
                theta_gradients = torch.autograd.grad(loss, theta)
                update(theta_sgd, theta, theta_gradients)
                if with_branch:
                    update(zeta_sgd, zeta, zeta_gradients)

            with torch.no_grad():
                features = shallow_part(main, image)
                scores = deep_part(main, features)
                if with_branch:
                    scores = mixed(scores, deep_part(side, features), alpha)
            rows.append(scores)
        result.append(torch.cat(rows))
        everyone = torch.ones(len(x), dtype=torch.bool)
        note(trace, Record(everyone, [everyone] * updates))
    return result


def cotta_extended_answers(
    variant: str,
    net: nn.Module,
    batches: list[Tensor],
    generator: Generator,
    *,
    lr: float,
    augment: Augment | None,
    trace: Trace = None,
    p_th: float = 0.1,
    copies: int = 32,
    restore: float = 0.001,
    teacher_memory: float = 0.999,
    rounds: int | None = None,
    alpha: float = 0.5,
    optimizer: str = "sgd",
    momentum: float = 0.9,
    nesterov: bool = True,
) -> list[Tensor]:
    """CoTTA with a branch (+poem, +poem-ii), with re-selection of everyone (+poem-i) or repeated (*).

    The student answers, after the last update; teacher and restore follow.
    """
    updates = updates_of(variant, rounds)
    with_branch = variant in ("+poem", "+poem-ii")
    main, side = with_batch_statistics(net), with_batch_statistics(net)
    slow_main, slow_side = with_batch_statistics(net), with_batch_statistics(net)
    anchor = with_batch_statistics(net)

    def theta_in(model: Net) -> list[nn.Parameter]:
        """Tensors named weight or bias, with a branch only those before the split."""
        tensors = [tensor for name, tensor in model.named_parameters() if name.endswith((".weight", ".bias"))]
        return without(tensors, parts_of(model)) if with_branch else tensors

    def zeta_in(model: Net) -> list[nn.Parameter]:
        """The branch's norm tensors in the order of named_parameters."""
        wanted = {id(tensor) for tensor in zeta_of(model)}
        return [tensor for _, tensor in model.named_parameters() if id(tensor) in wanted]

    def predict(first: Net, second: Net, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits, with a branch the combined log-probabilities and the branch's logits."""
        features = shallow_part(first, x)
        if not with_branch:
            return deep_part(first, features), None
        branch_logits = deep_part(second, features)
        return mixed(deep_part(first, features), branch_logits, alpha), branch_logits

    theta, zeta = theta_in(main), zeta_in(side)
    slow_theta, slow_zeta = theta_in(slow_main), zeta_in(slow_side)
    for tensor in theta:
        tensor.requires_grad_(True)
    theta_origin, zeta_origin = values(theta), values(zeta)
    theta_sgd = optimizer_of(theta, lr, optimizer, momentum, nesterov)
    zeta_sgd = optimizer_of(zeta, lr, optimizer, momentum, nesterov)
    result = []
    for x in batches:
        # The target: once, before any update.
        with torch.no_grad():
            if anchor(x).softmax(1).max(1).values.mean() < p_th:
                if augment is None:
                    raise ValueError("cotta needs augment when the anchor is unsure")
                looks = [predict(slow_main, slow_side, augment(x, generator))[0] for _ in range(copies)]
                target = torch.stack(looks).mean(0)
            else:
                target = predict(slow_main, slow_side, x)[0]

        for _ in range(updates):
            scores, branch_logits = predict(main, side, x)
            forth = -(target.softmax(1) * scores.log_softmax(1)).sum(1)
            back = -(scores.softmax(1) * target.log_softmax(1)).sum(1)
            loss = (0.5 * forth + 0.5 * back).mean()
            theta_gradients = torch.autograd.grad(loss, theta, retain_graph=True)
            zeta_gradients: Sequence[Tensor] = []
            if branch_logits is not None:
                zeta_gradients = torch.autograd.grad(cross_entropy(branch_logits, scores.argmax(1)), zeta)
            update(theta_sgd, theta, theta_gradients)
            if with_branch:
                update(zeta_sgd, zeta, zeta_gradients)

        # The answer, then the teacher follows, then single elements return to the source.
        with torch.no_grad():
            result.append(predict(main, side, x)[0])
            groups = [(theta, slow_theta, theta_origin)]
            if with_branch:
                groups.append((zeta, slow_zeta, zeta_origin))
            for fast_tensors, slow_tensors, _ in groups:
                for fast, slow in zip(fast_tensors, slow_tensors, strict=True):
                    slow.copy_(teacher_memory * slow + (1 - teacher_memory) * fast)
            for fast_tensors, _, origin in groups:
                draw = torch.rand(sum(tensor.numel() for tensor in fast_tensors), generator=generator) < restore
                start = 0
                for tensor, value in zip(fast_tensors, origin, strict=True):
                    mask = draw[start : start + tensor.numel()].view(tensor.shape)
                    tensor[mask] = value[mask]
                    start += tensor.numel()
        everyone = torch.ones(len(x), dtype=torch.bool)
        note(trace, Record(everyone, [everyone] * updates))
    return result


def answers(
    method: str,
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    seed: int = 0,
    batch_size: int | None = None,
    source: list[Tensor] | None = None,
    augment: Augment | None = None,
    views: Augment | None = None,
    trace: Trace = None,
    **options: Any,
) -> list[Tensor]:
    """What ``method`` answers to each batch while it adapts a copy of ``net``; ``trace`` collects the records."""
    g = torch.Generator().manual_seed(seed)
    if method == "source":
        return source_answers(net, batches, **options)
    if method == "bn":
        return bn_answers(net, batches, **options)
    if method == "lame":
        return lame_answers(net, batches, **options)
    if method == "tent":
        return tent_answers(net, batches, lr=lr, trace=trace, **options)
    if method == "tent-filtered":
        return tent_answers(net, batches, lr=lr, trace=trace, **{"threshold": 0.4, **options})
    if method == "eta":
        return eta_answers(net, batches, lr=lr, trace=trace, **options)
    if method == "eata":
        return eta_answers(net, batches, lr=lr, trace=trace, source=source, **options)
    if method == "rdumb":
        return eta_answers(net, batches, lr=lr, trace=trace, **{"reset_every": 1000, **options})
    if method == "sar":
        return sar_answers(net, batches, lr=lr, trace=trace, **options)
    if method == "deyo":
        return deyo_answers(net, batches, g, lr=lr, trace=trace, **options)
    if method == "roid":
        return roid_answers(net, batches, g, lr=lr, augment=augment, batch_size=batch_size, trace=trace, **options)
    if method == "memo":
        return memo_answers(net, batches, g, lr=lr, views=views, trace=trace, **options)
    if method == "cotta":
        return cotta_answers(net, batches, g, lr=lr, augment=augment, trace=trace, **options)
    if method == "poem":
        return poem_answers(net, batches, lr=lr, trace=trace, **options)
    if method == "poem-official":
        return poem_official_answers(net, batches, g, lr=lr, trace=trace, **options)
    if method == "poem-official-v2":
        options = {"first_threshold": 0.5, "redundancy": None, "loss_floor": None, **options}
        return poem_official_answers(net, batches, g, lr=lr, trace=trace, **options)
    for base in BASES:
        for variant in VARIANTS:
            if method == base + variant:
                known: dict[str, Any] = {"augment": augment, "batch_size": batch_size, "source": source}
                return extended_answers(base, variant, net, batches, g, lr=lr, trace=trace, **known, **options)
    for variant in VARIANTS:
        if method == "memo" + variant:
            return memo_extended_answers(variant, net, batches, g, lr=lr, views=views, trace=trace, **options)
        if method == "cotta" + variant:
            return cotta_extended_answers(variant, net, batches, g, lr=lr, augment=augment, trace=trace, **options)
    raise ValueError(f"expected one of {', '.join(METHODS)}, got {method!r}")
