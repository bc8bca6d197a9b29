"""Is this base what it says? Source accuracy beside what is known, and where they differ, what is wrong.

Most failed reproductions of this field come from four places: weights, mean and std, resize and crop, label order.
Each is tried on a small sample, image by image the same one, so that a few hundred images tell.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from poem import zoo

if TYPE_CHECKING:
    from poem.streams._images import Images
    from poem.streams.card import Card

Guesses = npt.NDArray[np.int64]
Watch = Callable[[Sequence[int], str], Iterable[int]]
SAMPLE_CLASSES, SAMPLE_EACH = 12, 16
"""How many classes, and images of each, a diagnosis looks at."""


@dataclass(frozen=True)
class Frame:
    """From a stored image to the model's size: short side to `resize`, centre `crop`; smaller images are enlarged."""

    resize: int
    crop: int
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    direct: bool = False

    def __str__(self) -> str:
        how = (
            f"straight to {self.crop}x{self.crop}"
            if self.direct
            else f"short side to {self.resize}, centre {self.crop}"
        )
        return f"{how} ({self.interpolation}; {self.crop}x{self.crop} left alone, smaller ones enlarged to {self.crop})"

    def __call__(self, image: Tensor) -> Tensor:
        """Pixels (3, crop, crop) as uint8, from (3, H, W)."""
        high, wide = image.shape[1:]
        if (high, wide) == (self.crop, self.crop):
            return image
        short = self.resize if min(high, wide) >= self.crop else self.crop
        size = [max(short, side * short // min(high, wide)) for side in (high, wide)]
        size = [self.crop, self.crop] if self.direct else size
        pixels = interpolate(image[None].float(), size=size, mode=self.interpolation, antialias=True)[0]
        top, left = ((side - self.crop) // 2 for side in size)
        return pixels.round().clamp(0, 255).to(torch.uint8)[:, top : top + self.crop, left : left + self.crop]


@dataclass(frozen=True)
class Setting:
    """What stands between a stored image and the network."""

    frame: Frame
    mean: zoo.Triple
    std: zoo.Triple

    @classmethod
    def of(cls, base: zoo.Base) -> Setting:
        """A base's own."""
        return cls(Frame(base.resize, base.crop, base.interpolation), base.mean, base.std)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and how much it costs on the sample."""

    kind: Literal["mean/std", "crop", "labels", "weights", "unknown"]
    words: str
    stated: float
    instead: float | None = None

    def __str__(self) -> str:
        change = "" if self.instead is None else f": {self.stated:.1f} -> {self.instead:.1f} % on the sample"
        return f"{self.kind}: {self.words}{change}"


@dataclass(frozen=True)
class Verdict:
    """What was measured, what was expected, what was found."""

    accuracy: float
    images: int
    known: zoo.Known | None
    allowed: float
    """Points of difference that pass: the known tolerance, and two standard errors where only a part was measured."""
    findings: tuple[Finding, ...]
    card: Card
    seconds: float

    @property
    def passed(self) -> bool:
        """Nothing speaks against the base."""
        agrees = self.known is None or abs(self.accuracy - self.known.accuracy) <= self.allowed
        return agrees and not self.findings

    def __str__(self) -> str:
        """One line of numbers, and a line per finding."""
        lines = [f"source accuracy {self.accuracy:.2f} % of {self.images} images in {self.seconds:.0f} s"]
        if self.known is None:
            lines[0] += "; nothing is known to compare it with"
        else:
            lines.append(f"known {self.known}; {self.allowed:.1f} points allowed")
        lines += [str(finding) for finding in self.findings]
        return "\n".join([*lines, "pass" if self.passed else "FAIL"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        known = None if self.known is None else {"accuracy": self.known.accuracy, "where": self.known.where}
        findings = [{"kind": f.kind, "words": f.words, "stated": f.stated, "instead": f.instead} for f in self.findings]
        return {
            "passed": self.passed, "accuracy": self.accuracy, "images": self.images, "known": known,
            "allowed": round(self.allowed, 2), "findings": findings, "seconds": round(self.seconds, 1),
            "card": self.card.to_dict(),
        }  # fmt: skip


def verify(
    name: str,
    data: str | Images,
    root: str | os.PathLike[str] | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    mean: zoo.Triple | None = None,
    std: zoo.Triple | None = None,
    limit: int | None = None,
    corruption: str | None = None,
    severity: int = 5,
    under: str | None = None,
    batch_size: int = 64,
    device: str | torch.device = "cpu",
    watch: Watch = lambda indices, words: indices,
) -> Verdict:
    """Measure a base's source accuracy on a data set, compare it with what is known, and say what is wrong.

    Args:
        name: One of `zoo.bases()`.
        data: A name of `poem.streams.datasets`, `digits-test`, a folder or tar of class folders, or a data set.
        root: Where named data lies; by default $POEM_DATA.
        weights: As `zoo.load` takes them.
        mean: Instead of the base's own, with `std`: what your code does.
        std: Instead of the base's own.
        limit: So many images, spread over the set by a fixed permutation.
        corruption: One of ImageNet-C's or CIFAR-C's; by default all fifteen, and their mean.
        severity: Of the corruption.
        under: The folder inside an archive that holds the class folders.
        batch_size: Images per pass.
        device: Where to run.
        watch: Wraps the indices of a pass, for a progress bar.
    """
    if (mean is None) != (std is None):
        raise ValueError("expected --mean and --std together, got one of them")
    if limit is not None and limit < 1:
        raise ValueError(f"expected a limit of at least 1, got {limit}")
    start = time.perf_counter()
    domains = [data] if not isinstance(data, str) else list(opened(data, root, corruption, severity, under))
    model, base = zoo.load(name, weights)
    model.to(device)
    setting = Setting.of(base)
    if mean is not None and std is not None:
        setting = replace(setting, mean=mean, std=std)
    scores, images = [], 0
    for each in domains:
        mask = mask_of(each, base)
        order = spread(len(each), limit)
        words = f"{each.describe()['data']} {each.describe()['corruption']}"
        guesses = answers(model, each, watch(order, words), setting, mask, batch_size)
        scores.append(100 * float((guesses == each.labels[order]).mean()))
        images += len(order)
    accuracy = sum(scores) / len(scores)
    known = recorded(base, domains)
    part = limit is not None and limit < len(domains[0])
    share = min(max(accuracy / 100, 0.01), 0.99)
    allowed = (known.tolerance if known else 0.0) + (200 * math.sqrt(share * (1 - share) / images) if part else 0.0)
    findings: tuple[Finding, ...] = ()
    off = known is not None and abs(accuracy - known.accuracy) > allowed
    if off or known is None or setting != Setting.of(base):
        easiest = domains[scores.index(max(scores))]  # where causes show best
        mask = mask_of(easiest, base)
        findings = diagnose(model, base, easiest, setting, mask, batch_size, sure=off, watch=watch)
    made = card(base, setting, domains, images, batch_size, weights)
    return Verdict(round(accuracy, 3), images, known, allowed, findings, made, time.perf_counter() - start)


def opened(
    name: str, root: str | os.PathLike[str] | None, corruption: str | None, severity: int, under: str | None
) -> Iterator[Images]:
    """The data set of that name, once per corruption; images as stored, so that crops can be compared."""
    from poem.streams import datasets
    from poem.streams._known import TREES
    from poem.streams._shift import CORRUPTIONS

    asis: dict[str, Any] = {"prepare": datasets.Prepare()}
    folder = Path(name).expanduser()
    if folder.exists() and name not in datasets.DATASETS:
        if corruption is not None:
            raise ValueError(f"expected imagenet-c, cifar10-c or cifar100-c with a corruption, got the folder {name}")
        yield datasets.image_folder(folder, under=under, **asis)
        return
    if name != "digits-test":
        name = datasets.canonical(name)
    if name == "digits-test":
        from poem.train import digits

        task = digits()
        yield datasets.Tensors(
            task.test.images, task.test.labels, name=name, provenance=f"{task.about['data']}; {task.about['split']}"
        )
    elif name.endswith("-c"):
        for each in CORRUPTIONS if corruption is None else (corruption,):
            extra = asis if name == "imagenet-c" else {}
            yield datasets.open_dataset(name, root, corruption=each, severity=severity, **extra)
    elif corruption is not None:
        raise ValueError(f"expected imagenet-c, cifar10-c or cifar100-c with a corruption, got {name}")
    else:
        yield datasets.open_dataset(name, root, **(asis if name in (*TREES, "folder", "archive") else {}))


def mask_of(data: Images, base: zoo.Base) -> list[int] | None:
    """Which of the model's logits the data's classes are; folders named by wnid know it themselves."""
    mask = None if data.mask is None else list(data.mask)
    names = data.classes or ()
    count = len(names) or int(data.labels.max()) + 1
    if mask is None and base.classes == 1000 and names and all(re.fullmatch(r"n\d{8}", name) for name in names):
        mask = imagenet_rank(names)
    if mask is None and count > base.classes:
        raise ValueError(f"expected at most {base.classes} classes for {base.name}, got data with {count}")
    if mask is None and names and count != base.classes:
        raise ValueError(
            f"expected {base.classes} class folders for {base.name}, or folders named by wnid, got {count} "
            f"({', '.join(names[:3])}, ...)"
        )
    if mask is not None and max(mask) >= base.classes:
        raise ValueError(f"expected a base with 1000 classes for {data.describe()['data']}, got {base.name}")
    return mask


def imagenet_rank(wnids: Sequence[str]) -> list[int]:
    """Positions of wnids among the sorted 1000 of ImageNet-1k."""
    try:
        from timm.data.imagenet_info import ImageNetInfo
    except ImportError as error:
        raise ImportError("the list of ImageNet's wnids comes with timm; pip install 'poem-tta[bench]'") from error
    info: Any = ImageNetInfo("imagenet-1k")
    rank = {wnid: index for index, wnid in enumerate(sorted(info.label_names()))}
    strange = [wnid for wnid in wnids if wnid not in rank]
    if strange:
        raise ValueError(f"expected wnids of ImageNet-1k, got {len(strange)} others: {', '.join(strange[:3])}")
    return [rank[wnid] for wnid in wnids]


def spread(count: int, limit: int | None) -> list[int]:
    """All indices, or a fixed random part of them in ascending order."""
    if limit is None or limit >= count:
        return list(range(count))
    return sorted(np.random.RandomState(0).permutation(count)[:limit].tolist())


@torch.no_grad()
def answers(
    model: nn.Module, data: Images, order: Iterable[int], setting: Setting, mask: list[int] | None, batch_size: int = 64
) -> Guesses:
    """The class that the model names for each image, in the data's own numbering."""
    place = next(model.parameters()).device
    mean, std = (torch.tensor(v, device=place).view(1, -1, 1, 1) for v in (setting.mean, setting.std))
    guesses: list[Tensor] = []

    def ask(pixels: list[Tensor]) -> None:
        x = torch.stack(pixels).to(place).float() / 255
        logits = model((x - mean) / std)
        guesses.append((logits if mask is None else logits[:, mask]).argmax(1).cpu())

    waiting: list[Tensor] = []
    for index in order:
        waiting.append(setting.frame(data[index]))
        if len(waiting) == batch_size:
            ask(waiting)
            waiting = []
    if waiting:
        ask(waiting)
    return torch.cat(guesses).numpy()


def recorded(base: zoo.Base, domains: Sequence[Images]) -> zoo.Known | None:
    """What is known of the base on this data."""
    about = domains[0].describe()
    what = "mean of 15" if len(domains) == 15 else about["corruption"]
    asked = about["data"], what, about["severity"]
    return next((k for k in base.known if (k.data, k.corruption, k.severity) == asked), None)


def card(
    base: zoo.Base,
    setting: Setting,
    domains: Sequence[Images],
    images: int,
    batch_size: int,
    weights: str | os.PathLike[str] | None,
) -> Card:
    """The protocol of the measurement."""
    from poem.streams.card import Card

    about = [each.describe() for each in domains]
    tag = base.tag if weights is None else f"{base.tag}, weights {weights}"
    whole = images == sum(len(each) for each in domains)
    return Card(
        data=about[0]["data"],
        n=images // len(domains),
        total=images,
        subset=about[0]["subset"] if whole else f"{images // len(domains)} of {len(domains[0])}, permutation seed 0",
        classes=about[0]["classes"],
        corruptions=tuple(each["corruption"] for each in about),
        severity=tuple(sorted({each["severity"] for each in about})),
        order="as stored; source model, nothing adapts",
        batch_size=batch_size,
        base=f"{base.name} ({base.kind} {tag})",
        normalisation=zoo.normalisation(setting.mean, setting.std),
        provenance=about[0]["provenance"],
        preparation=str(setting.frame),
    )


def diagnose(
    model: nn.Module,
    base: zoo.Base,
    data: Images,
    setting: Setting,
    mask: list[int] | None,
    batch_size: int = 64,
    *,
    sure: bool,
    watch: Watch = lambda indices, words: indices,
) -> tuple[Finding, ...]:
    """Try other means, crops and label orders on a sample; the first cause that explains much is named.

    `sure` says that something is wrong; otherwise silence is an answer too.
    """
    order = sample(data.labels)
    labels = data.labels[order]

    def guess(variant: Setting, words: str) -> Guesses:
        return answers(model, data, watch(order, words), variant, mask, batch_size)

    stated = guess(setting, "as stated")
    right = stated == labels
    score = 100 * float(right.mean())
    better: list[Finding] = []
    for kind, words, variant in variants(base, setting):
        also = guess(variant, words) == labels
        gain = int(also.sum()) - int(right.sum())
        noise = 2 * math.sqrt(int((also != right).sum()))  # paired: only images that change their answer count
        if gain > noise and 100 * gain / len(order) >= 2:
            better.append(Finding(kind, words, score, 100 * float(also.mean())))
    chance = 100 / (len(mask) if mask is not None else base.classes)
    numbers = numbered(data)
    renamed = None if numbers is None else 100 * float((numbers[labels] == stated).mean())
    agreement = consistency(stated, labels)
    best = max(better, key=lambda finding: finding.instead or 0.0, default=None)
    found: list[Finding] = []
    if renamed is not None and renamed > score + 20:
        words = "folders are class numbers, but were ordered as text (0, 1, 10, 100, ...); order them as numbers"
        found.append(Finding("labels", words, score, renamed))
    elif best is not None and (best.instead or 0) > 3 * chance:
        found.append(best)
    elif agreement > score + 20 and agreement > 3 * chance:
        words = "images of a folder agree with each other but not with its label; the folders' order is permuted"
        found.append(Finding("labels", words, score, agreement))
    elif score <= 3 * chance:
        words = (
            f"accuracy is near chance ({chance:.1f} %) whatever the input; the weights are random or another model's"
        )
        found.append(Finding("weights", words, score))
    elif sure:
        words = "no other mean/std, crop or label order explains it; other weights under this name, or other images"
        found.append(Finding("unknown", words, score))
    return tuple(found)


def variants(base: zoo.Base, setting: Setting) -> Iterator[tuple[Literal["mean/std", "crop"], str, Setting]]:
    """Other ways to prepare an image, one change at a time; a legacy base is off on purpose and keeps its own."""
    own_norm = base.mean, base.std
    for mean, std in dict.fromkeys([own_norm, *(() if base.legacy else (zoo.IMAGENET, zoo.HALF, zoo.NONE))]):
        if (mean, std) != (setting.mean, setting.std):
            own = "the base's own" if (mean, std) == own_norm else "another base's"
            words = f"stated {zoo.normalisation(setting.mean, setting.std)}; use {own}, {zoo.normalisation(mean, std)}"
            yield "mean/std", words, replace(setting, mean=mean, std=std)
    frame = setting.frame
    other: Literal["bilinear", "bicubic"] = "bicubic" if frame.interpolation == "bilinear" else "bilinear"
    wider = Frame(round(frame.crop / 0.875), frame.crop, frame.interpolation)
    tight = Frame(frame.crop, frame.crop, frame.interpolation)
    own_frame = Setting.of(base).frame
    frames = [own_frame, replace(frame, interpolation=other), replace(frame, direct=not frame.direct), wider, tight]
    for changed in dict.fromkeys(frames):
        if changed != frame:
            yield "crop", f"stated {frame}; use {changed}", replace(setting, frame=changed)


def sample(labels: npt.NDArray[np.int64]) -> list[int]:
    """A few images of a few classes, spread over both."""
    kinds = np.unique(labels)
    chosen = kinds[np.linspace(0, len(kinds) - 1, min(SAMPLE_CLASSES, len(kinds))).round().astype(int)]
    rows: list[int] = []
    for kind in chosen:
        each = np.flatnonzero(labels == kind)
        rows += each[np.linspace(0, len(each) - 1, min(SAMPLE_EACH, len(each))).round().astype(int)].tolist()
    return rows


def numbered(data: Images) -> Guesses | None:
    """The number that each folder's name is, where all names are numbers and stand in another order."""
    names = data.classes or ()
    if not names or not all(name.isdecimal() for name in names):
        return None
    numbers = np.array([int(name) for name in names], dtype=np.int64)
    return None if bool((numbers == np.arange(len(numbers))).all()) else numbers


def consistency(guesses: Guesses, labels: npt.NDArray[np.int64]) -> float:
    """Percent of images whose guess is the commonest one among the *other* images of their folder."""
    right = 0
    for kind in np.unique(labels):
        own = guesses[labels == kind]
        for index in range(len(own)):
            others = np.delete(own, index)
            if len(others):
                values, counts = np.unique(others, return_counts=True)
                right += int(values[counts.argmax()] == own[index])
    return 100 * right / len(labels)
