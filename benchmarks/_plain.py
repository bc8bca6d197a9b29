"""Straightforward implementations of POEM and Tent, which `benchmarks/speed.py` compares the library with.

Written from the paper, to be a fair comparison. The deep part is deep-copied, norm layers lose their running
statistics, selected samples are indexed, sets are compared on the host, and `torch.optim` steps. The code computes what
the method "poem" computes (tests/bench/test_speed.py compares them), and where a choice was open it takes the faster
one: the features before the split are computed once for both branches, frozen weights need no gradient, the branch's
loss is propagated through the branch alone, and the last forward pass keeps no graph. With `separate` the two branches
are two networks that share their shallow modules, each with a forward of its own: the same answers, in simpler code.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORMS = (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


def softmax_entropy(logits: Tensor) -> Tensor:
    """Entropy (B,) of each row of logits."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def configure(model: nn.Module) -> nn.Module:
    """Set training mode, gradients for norm layers alone, and batch norm without running statistics."""
    model.train()
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, NORMS):
            module.requires_grad_(True)
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    return model


def norm_parameters(model: nn.Module, without: tuple[nn.Module, ...] = ()) -> list[nn.Parameter]:
    """Scales and shifts of all norm layers, except those inside some modules."""
    left_out = {id(inner) for outer in without for inner in outer.modules()}
    norms = [module for module in model.modules() if isinstance(module, NORMS) and id(module) not in left_out]
    return [parameter for norm in norms for parameter in norm.parameters()]


class Pool(nn.Module):
    """Mean over height and width."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, D) from (B, D, H, W)."""
        return x.mean((2, 3))


class FirstToken(nn.Module):
    """The class token."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, D) from (B, T, D)."""
        return x[:, 0]


def deep_part(model: nn.Module) -> tuple[nn.Sequential, tuple[nn.Module, ...]]:
    """The modules that the adapt branch copies, split to logits, and those whose norm layers are not adapted.

    ResNets: the last stage. ViTs of timm and of torchvision: the last block, while the last quarter of the blocks and
    the final norm stay.
    """
    parts = dict(model.named_children())
    if "layer4" in parts:
        return nn.Sequential(parts["layer4"], Pool(), parts["fc"]), (parts["layer4"],)
    if {"blocks", "norm", "head"} <= parts.keys():
        blocks, norm, head = list(parts["blocks"].children()), parts["norm"], parts["head"]
    elif "encoder" in parts:
        inner = dict(parts["encoder"].named_children())
        blocks, norm, head = list(inner["layers"].children()), inner["ln"], parts["heads"]
    else:
        raise ValueError(f"expected a ResNet or a ViT by the names of its parts, got {type(model).__name__}")
    top = (*blocks[-max(1, len(blocks) // 4) :], norm)
    return nn.Sequential(blocks[-1], norm, FirstToken(), head), top


class PlainTent:
    """Forward, mean entropy, backward, step; the answer is from before the step."""

    def __init__(self, model: nn.Module, *, lr: float) -> None:
        self.model = configure(model)
        self.optimizer = torch.optim.SGD(norm_parameters(model), lr=lr, momentum=0.9)

    def __call__(self, images: Tensor) -> Tensor:
        """Logits (B, C)."""
        logits: Tensor = self.model(images)
        loss = softmax_entropy(logits).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return logits.detach()


class PlainPoem:
    """Algorithm 1: predict with both branches, select, update both groups; repeat until the selected set is the same.

    Args:
        model: A ResNet or a ViT; it is changed in place.
        lr: Learning rate of both groups.
        rounds: Updates per batch, at most.
        threshold: Samples whose entropy is below this share of ln C are selected; a large one selects all.
        repeat: Use the first set in every round, and do not compare sets.
        separate: Run a forward through the whole network for each branch.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        rounds: int = 2,
        threshold: float = 0.4,
        repeat: bool = False,
        separate: bool = False,
    ) -> None:
        deep, top = deep_part(model)
        self.model = configure(model)
        copied = {id(module) for module in deep.modules()}
        shared = {id(module): module for module in model.modules() if not copied & {id(m) for m in module.modules()}}
        self.twin = configure(copy.deepcopy(model, dict(shared))) if separate else None
        self.branch = deep_part(self.twin)[0] if self.twin is not None else configure(copy.deepcopy(deep))
        self.rounds, self.threshold, self.repeat = rounds, threshold, repeat
        self.updates = 0
        shallow, own = norm_parameters(model, without=top), norm_parameters(self.branch)
        self._own = own
        self.shallow_optimizer = torch.optim.SGD(shallow, lr=lr, momentum=0.9)
        self.branch_optimizer = torch.optim.SGD(own, lr=lr, momentum=0.9)
        self._features: Tensor | None = None
        deep[0].register_forward_pre_hook(self._tap)

    def __call__(self, images: Tensor) -> Tensor:
        """The log of the combined probability (B, C), after the last update."""
        mixed, adapted = self._predict(images)
        chosen = self._select(mixed)
        previous: Tensor | None = None
        self.updates = 0
        while self.updates < self.rounds and len(chosen) > 0:
            if previous is not None and not self.repeat and set(chosen.tolist()) == set(previous.tolist()):
                break
            self._update(mixed, adapted, chosen)
            self.updates += 1
            with torch.set_grad_enabled(self.updates < self.rounds):
                mixed, adapted = self._predict(images)
            previous = chosen
            if not self.repeat:
                chosen = self._select(mixed)
        return mixed.detach().log()

    def _tap(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._features = args[0]

    def _predict(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities of both branches together, and the adapt branch's logits."""
        source = self.model(images)
        assert self._features is not None
        adapted = self.branch(self._features) if self.twin is None else self.twin(images)
        self._features = None
        return 0.5 * source.softmax(1) + 0.5 * adapted.softmax(1), adapted

    def _select(self, mixed: Tensor) -> Tensor:
        """Indices of the selected samples."""
        return torch.where(_entropy(mixed.detach()) < self.threshold * math.log(mixed.shape[1]))[0]

    def _update(self, mixed: Tensor, adapted: Tensor, chosen: Tensor) -> None:
        """Update the shallow group by entropy, and the branch by cross-entropy to the combined label."""
        self.model.zero_grad()
        entropy = _entropy(mixed[chosen]).mean()
        entropy.backward(retain_graph=True)
        self.branch_optimizer.zero_grad()  # clear the entropy's gradients
        label = mixed[chosen].detach().argmax(1)
        F.cross_entropy(adapted[chosen], label).backward(inputs=self._own)
        self.shallow_optimizer.step()
        self.branch_optimizer.step()


def _entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * probabilities.clamp(min=1e-30).log()).sum(1)
