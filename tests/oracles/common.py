"""What several references share: the record of a batch, entropies, norm layers, a net in two halves, SGD."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from nets import ConvNet, Transformer
from torch import Generator, Tensor, nn

Augment = Callable[[Tensor, Generator], Tensor]
Net = ConvNet | Transformer


@dataclass
class Outcome:
    """One batch of a run: the answer, the first selection, and the samples of each update that was made."""

    answer: Tensor
    selected: Tensor
    updates: list[Tensor] = field(default_factory=list)
    reset: bool = False


def everyone(x: Tensor) -> Tensor:
    """A mask of all samples."""
    return torch.ones(len(x), dtype=torch.bool)


# Predictions ----------------------------------------------------------------------------------------------------------


def entropy(logits: Tensor) -> Tensor:
    """Entropy of each row in nats; log-probabilities are logits too."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def below(logits: Tensor, margin: float) -> Tensor:
    """Samples whose entropy is below a multiple of its largest value, ln C."""
    return entropy(logits) < margin * math.log(logits.shape[1])


def confidence_weight(entropies: Tensor, classes: int) -> Tensor:
    """exp(0.4 ln C - H), a constant for the gradient: ETA's and DeYO's."""
    return (0.4 * math.log(classes) - entropies.detach()).exp()


def cosine(average: Tensor, probabilities: Tensor) -> Tensor:
    """Cosine between the average prediction and each row."""
    length: Tensor = probabilities.norm(dim=1) * average.norm()
    return (probabilities * average).sum(1) / length


def averaged(old: Tensor | None, new: Tensor, momentum: float = 0.9) -> Tensor:
    """Exponential average that starts with its first value."""
    return new if old is None else momentum * old + (1 - momentum) * new


def mixed(source_logits: Tensor, branch_logits: Tensor) -> Tensor:
    """Log of the mean of two heads' probabilities."""
    both = torch.stack([source_logits.log_softmax(1), branch_logits.log_softmax(1)])
    return both.logsumexp(0) - math.log(2)


# Images ---------------------------------------------------------------------------------------------------------------


def shuffled(x: Tensor, rng: Generator) -> Tensor:
    """Each image with the tiles of its 4 x 4 grid permuted on its own."""
    order = torch.rand(len(x), 16, generator=rng).argsort(dim=1)
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


def drop_of(clean: Tensor, destroyed: Tensor) -> Tensor:
    """PLPD: how much the probability of the predicted class falls, row by row."""
    label = clean.argmax(1)
    rows = torch.arange(len(label))
    return clean[rows, label] - destroyed[rows, label]


# Networks -------------------------------------------------------------------------------------------------------------


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


def modules_beyond_split(net: Net) -> list[nn.Module]:
    """What `deep_part` runs."""
    return [net.layer4, net.fc] if isinstance(net, ConvNet) else [net.blocks[7], net.norm, net.head]


# Which tensors move ---------------------------------------------------------------------------------------------------


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


def moving(tensors: list[nn.Parameter]) -> list[nn.Parameter]:
    """The same tensors, now with gradients."""
    for tensor in tensors:
        tensor.requires_grad_(True)
    return tensors


def all_norms(net: Net) -> list[nn.Parameter]:
    """Every norm layer's weight and bias: Tent, ETA, EATA, ROID, RDumb."""
    return moving(norm_tensors(net))


def norms_below_top(net: Net) -> list[nn.Parameter]:
    """Without the last stage of a ResNet or the last quarter of a transformer: SAR, DeYO, POEM."""
    top = [net.layer4] if isinstance(net, ConvNet) else [net.blocks[6], net.blocks[7], net.norm]
    return moving(without(norm_tensors(net), top))


def norms_below_split(net: Net) -> list[nn.Parameter]:
    """Without the layers of which an adapt branch holds a copy of its own."""
    return moving(without(norm_tensors(net), modules_beyond_split(net)))


def branch_norms(branch: Net) -> list[nn.Parameter]:
    """The norm layers of the branch, which is the deep part of a second copy of the net."""
    return moving([tensor for module in modules_beyond_split(branch) for tensor in norm_tensors(module)])


# Steps ----------------------------------------------------------------------------------------------------------------


def sgd(tensors: list[nn.Parameter], lr: float, *, nesterov: bool = False) -> torch.optim.Optimizer:
    """SGD with the momentum that every method but MEMO uses."""
    return torch.optim.SGD(tensors, lr=lr, momentum=0.9, nesterov=nesterov)


def adam(tensors: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Adam with torch's own defaults."""
    return torch.optim.Adam(tensors, lr=lr)


def step(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> None:
    """One step of the optimiser with the given gradients."""
    for tensor, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        tensor.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the present values."""
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def put_back(tensors: Sequence[Tensor], old: Sequence[Tensor]) -> None:
    """Sets the tensors to earlier values."""
    for tensor, value in zip(tensors, old, strict=True):
        tensor.copy_(value)
