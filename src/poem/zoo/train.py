"""Train our own source networks: a plan per network, the augmentation, the training loop, and the record of the result.

Images stay uint8 on the training device; crops, flips and mixtures are made there, for a whole batch at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, pad

from poem.zoo import nets
from poem.zoo.predictions import channel_tensor
from poem.zoo.train_data import TrainTestData
from poem.zoo.training_check import accuracy_error


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hyperparameters of one training run. `lr` is the peak, after the warmup; it then falls to zero along a cosine."""

    epochs: int
    batch: int
    optimizer: Literal["sgd", "adamw"] = "sgd"  # sgd: Nesterov momentum 0.9
    lr: float
    weight_decay: float  # of matrices and kernels; none for norm layers, biases and embeddings
    warmup: float = 0.2  # fraction of all steps
    smoothing: float = 0.05  # label smoothing
    shift: int = 4  # maximal shift of the random crop in pixels, over reflected borders
    flip: bool = True  # horizontally, with probability 0.5
    cutout: int = 0  # side of the blanked square in pixels
    mix: float = 0.0  # probability that a batch is mixed (mixup or cutmix), until 85 % of the steps
    turn: float = 0.0  # maximal rotation in degrees; if set, also up to 10 % of scale
    clip: float | None = None  # maximal norm of the gradient


PLANS: dict[str, Plan] = {
    "digits-bn": Plan(epochs=30, batch=64, lr=0.1, weight_decay=5e-4, shift=2, flip=False, turn=12.0),
    "digits-gn": Plan(epochs=30, batch=64, lr=0.05, weight_decay=5e-4, shift=2, flip=False, turn=12.0, clip=2.0),
    "digits-ln": Plan(
        epochs=40, batch=64, optimizer="adamw", lr=2e-3, weight_decay=0.05, shift=2, flip=False, turn=12.0, clip=1.0
    ),
    "cifar10-bn": Plan(epochs=300, batch=512, lr=0.3, weight_decay=5e-4, mix=0.3),
    "cifar10-gn": Plan(epochs=300, batch=256, lr=0.1, weight_decay=5e-4, mix=0.2, clip=2.0),
    "cifar10-vit": Plan(
        epochs=300, batch=256, optimizer="adamw", lr=1.5e-3, weight_decay=0.05, warmup=0.1, mix=0.3, clip=1.0
    ),
}
"""The plan of each network in `poem.zoo.nets`; CIFAR-100's are those of CIFAR-10."""
PLANS |= {name.replace("cifar10-", "cifar100-"): plan for name, plan in PLANS.items() if name.startswith("cifar10-")}


class TrainAugment:
    """Random crop, flip, rotation and cutout of every image of a batch, and mixing of pairs."""

    def __init__(self, plan: Plan, task: TrainTestData, rng: torch.Generator) -> None:
        self.plan, self.rng, self.device = plan, rng, rng.device
        self.mean, self.std = (channel_tensor(each, self.device) * 255 for each in (task.mean, task.std))

    def __call__(self, images: Tensor) -> Tensor:
        """Augment and normalise uint8 images."""
        size, plan = images.shape[-1], self.plan
        rows = self._integers(2 * plan.shift + 1, len(images), 1)
        cols = self._integers(2 * plan.shift + 1, len(images), 1)
        line = torch.arange(size, device=self.device)
        across = line.expand(len(images), -1)
        if plan.flip:
            across = torch.where(self._integers(2, len(images), 1) > 0, across.flip(1), across)
        wide = pad(images.float(), (plan.shift,) * 4, mode="reflect")
        each = torch.arange(len(images), device=self.device).view(-1, 1, 1)
        moved = wide[each, :, (line + rows).unsqueeze(2), (across + cols).unsqueeze(1)].permute(0, 3, 1, 2)
        views = (moved - self.mean) / self.std
        if plan.turn:
            views = self._rotate(views)
        if plan.cutout:
            views = views.masked_fill(self._box(len(images), size, plan.cutout), 0.0)
        return views

    def _integers(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=self.rng, device=self.device)

    def _box(self, count: int, size: int, side: int) -> Tensor:
        """A mask per image: True inside a square whose centre is random."""
        line = torch.arange(size, device=self.device).view(1, -1)
        rows, cols = ((line - self._integers(size, count, 1) + side // 2) for _ in range(2))
        inside = ((rows >= 0) & (rows < side)).unsqueeze(2) & ((cols >= 0) & (cols < side)).unsqueeze(1)
        return inside.unsqueeze(1)

    def _rotate(self, views: Tensor) -> Tensor:
        """Rotate and scale by random amounts; outside the image the border is repeated."""
        count = len(views)
        draw = torch.rand(2, count, generator=self.rng, device=self.device) * 2 - 1
        angle, scale = draw[0] * math.radians(self.plan.turn), 1 + 0.1 * draw[1]
        cos, sin, zero = angle.cos() * scale, angle.sin() * scale, torch.zeros_like(angle)
        theta = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
        grid = affine_grid(theta, list(views.shape), align_corners=False)
        return grid_sample(views, grid, padding_mode="border", align_corners=False)

    def mix_pairs(self, views: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor, float]:
        """Blend pairs of images (mixup) or paste one into the other (cutmix); returns partners and share too."""
        partner = torch.randperm(len(views), generator=self.rng, device=self.device)
        kind, share, top, left = torch.rand(4, generator=chance).tolist()
        if kind < 0.5:
            return torch.lerp(views, views[partner], share), partner, share
        size = views.shape[-1]
        side = round(size * math.sqrt(share))
        y, x = (round(corner * (size - side)) for corner in (top, left))
        views = views.clone()
        views[:, :, y : y + side, x : x + side] = views[partner, :, y : y + side, x : x + side]
        return views, partner, side * side / size**2


@dataclass(frozen=True)
class FitResult:
    """Epochs, seconds and last mean loss of a training run."""

    epochs: int
    seconds: float
    loss: float


def fit(
    net: nn.Module,
    task: TrainTestData,
    plan: Plan,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    budget: float | None = None,
    compiled: bool = False,
    tell: Callable[[int, int, float], None] = lambda epoch, epochs, loss: None,
) -> FitResult:
    """Train `net` in place by `plan`; it is left in eval mode.

    On CUDA the network computes in bfloat16 with channels last. The same seed gives the same weights on the CPU with
    one and the same number of threads; on a GPU the order of sums may differ.

    Args:
        net: A network with initial weights; moved to `device`.
        task: The data; only its training split is read.
        plan: The hyperparameters.
        seed: Seed of the order of images and of the augmentation.
        device: Device to train on.
        budget: Seconds. A plan that would take longer, by the time of the first steps, gets fewer epochs.
        compiled: Train through `torch.compile`, which needs a C compiler; the same steps.
        tell: Called after every epoch with its number, the number of epochs and the mean loss.
    """
    place = torch.device(device)
    cuda = place.type == "cuda"
    net.to(place).to(memory_format=torch.channels_last).train()
    data = task.train.to(place)
    size = min(plan.batch, len(data))
    each, epochs = len(data) // size, plan.epochs
    rng, chance = torch.Generator(place).manual_seed(seed), torch.Generator().manual_seed(seed)
    augment, optimizer = TrainAugment(plan, task, rng), _optimizer(net, plan)
    run = torch.compile(net) if compiled else net
    start, step, mean, timed = time.perf_counter(), 0, math.nan, 0.0
    epoch = 0
    while epoch < epochs:
        order = torch.randperm(len(data), generator=rng, device=place)
        total = torch.zeros((), device=place)
        for rows in order[: each * size].view(each, size):
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * lr_factor(step / (each * epochs), plan.warmup)
            views, labels = augment(data.images[rows]), data.labels[rows]
            partner, share = None, 0.0
            if torch.rand((), generator=chance) < plan.mix and step < 0.85 * each * epochs:
                views, partner, share = augment.mix_pairs(views, chance)
            views = views.contiguous(memory_format=torch.channels_last)
            with torch.autocast(place.type, dtype=torch.bfloat16, enabled=cuda):
                logits = run(views)
            loss = (1 - share) * cross_entropy(logits.float(), labels, label_smoothing=plan.smoothing)
            if partner is not None:
                loss = loss + share * cross_entropy(logits.float(), labels[partner], label_smoothing=plan.smoothing)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if plan.clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), plan.clip)
            optimizer.step()
            total += loss.detach()
            step += 1
            if budget is not None and step in (20, 60):  # the first steps are slower: they select kernels
                if cuda:
                    torch.cuda.synchronize()
                now = time.perf_counter()
                if step == 60:
                    left = budget - (now - start)
                    epochs = max(1, min(epochs, int((60 + left * 40 / (now - timed)) / each)))
                timed = now
        mean = float(total) / each
        epoch += 1
        tell(epoch, epochs, mean)
        if not math.isfinite(mean):
            raise ValueError(f"training went astray: loss {mean} in epoch {epoch}; lower the plan's lr ({plan.lr})")
    net.eval()
    return FitResult(epoch, time.perf_counter() - start, mean)


def lr_factor(done: float, warmup: float) -> float:
    """Fraction of the peak learning rate after a fraction `done` of all steps: linear warmup, then a cosine."""
    if done < warmup:
        return done / warmup
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def _optimizer(net: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """The plan's optimiser; weight decay for matrices and kernels alone."""
    undecayed = [p for name, p in net.named_parameters() if p.dim() < 2 or name in ("token", "position")]
    decayed = [p for name, p in net.named_parameters() if p.dim() >= 2 and name not in ("token", "position")]
    groups = [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    if plan.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=plan.lr, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=plan.lr)


@torch.no_grad()
def accuracy(net: nn.Module, task: TrainTestData, *, device: str | torch.device = "cpu", batch: int = 500) -> float:
    """Accuracy on the test images in percent, in eval mode and full precision."""
    place = torch.device(device)
    net.to(place).eval()
    mean, std = (channel_tensor(each, place) for each in (task.mean, task.std))
    right = 0
    for start in range(0, len(task.test), batch):
        images = task.test.images[start : start + batch].to(place).float() / 255
        labels = task.test.labels[start : start + batch].to(place)
        right += int((net((images - mean) / std).argmax(1) == labels).sum())
    return 100.0 * right / len(task.test)


def train(
    name: str,
    task: TrainTestData,
    out: Path,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    budget: float | None = None,
    compiled: bool = False,
    plan: Plan | None = None,
    tell: Callable[[int, int, float], None] = lambda epoch, epochs, loss: None,
) -> dict[str, Any]:
    """Train one of our own networks, write `out/NAME.safetensors`, and return its record: accuracy, SHA-256, settings.

    The accuracy is measured with the weights as read back from the file.
    """
    plan = plan or PLANS[name]
    net = nets.build(name, seed=seed)
    done = fit(net, task, plan, seed=seed, device=device, budget=budget, compiled=compiled, tell=tell)
    path = out / f"{name}.safetensors"
    digest = nets.save_net(net, path, {"poem": name})
    again = nets.load_net(nets.build(name), path)
    place = torch.device(device)
    measured = accuracy(again, task, device=place)
    return {
        "accuracy": round(measured, 2),
        "test_images": len(task.test),
        "standard_error": round(accuracy_error(measured, len(task.test)), 2),
        "file": path.name,
        "sha256": digest,
        "bytes": path.stat().st_size,
        "parameters": sum(p.numel() for p in again.parameters()),
        "seconds": round(done.seconds, 1),
        "epochs": done.epochs,
        "seed": seed,
        "plan": asdict(plan),
        "task": task.about,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
    }
