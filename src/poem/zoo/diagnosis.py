"""Diagnose a wrong source accuracy: try other means, crops and label orders on a small sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from torch import nn

from poem import zoo
from poem.zoo.predictions import Predictions, Preprocessing, ResizeCrop, predict_classes

if TYPE_CHECKING:
    from poem.streams.images import Images

ProgressWrapper = Callable[[Sequence[int], str], Iterable[int]]
"""Wraps the indices of a pass over images, with its title, to show a progress bar."""
SAMPLE_CLASSES, SAMPLE_EACH = 12, 16
"""Number of classes in the sample, and of images per class."""


@dataclass(frozen=True)
class Finding:
    """One probable cause, with the accuracy on the sample as stated and with the cause removed."""

    kind: Literal["mean/std", "crop", "labels", "weights", "unknown"]
    words: str
    stated: float
    instead: float | None = None

    def __str__(self) -> str:
        change = "" if self.instead is None else f": {self.stated:.1f} -> {self.instead:.1f} % on the sample"
        return f"{self.kind}: {self.words}{change}"


def diagnose(
    model: nn.Module,
    base: zoo.Base,
    data: Images,
    preprocessing: Preprocessing,
    mask: list[int] | None,
    batch_size: int = 64,
    *,
    mismatch: bool,
    watch: ProgressWrapper = lambda indices, words: indices,
) -> tuple[Finding, ...]:
    """Try other means, crops and label orders on a sample, and return the most probable cause.

    With `mismatch` the accuracy is known to be wrong, and a finding "unknown" is returned if no cause is found.
    """
    order = sample_indices(data.labels)
    labels = data.labels[order]

    def predict(variant: Preprocessing, words: str) -> Predictions:
        return predict_classes(model, data, watch(order, words), variant, mask, batch_size)

    stated = predict(preprocessing, "as stated")
    right = stated == labels
    score = 100 * float(right.mean())
    better: list[Finding] = []
    for kind, words, variant in other_preprocessing(base, preprocessing):
        also = predict(variant, words) == labels
        gain = int(also.sum()) - int(right.sum())
        noise = 2 * math.sqrt(int((also != right).sum()))  # paired test: only images whose prediction changes count
        if gain > noise and 100 * gain / len(order) >= 2:
            better.append(Finding(kind, words, score, 100 * float(also.mean())))
    chance = 100 / (len(mask) if mask is not None else base.classes)
    numbers = folder_numbers(data)
    renamed = None if numbers is None else 100 * float((numbers[labels] == stated).mean())
    agreement = folder_agreement(stated, labels)
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
    elif mismatch:
        words = "no other mean/std, crop or label order explains it; other weights under this name, or other images"
        if "re-encoded" in str(data.describe().get("provenance")):
            words += ": these are re-encoded copies, the known accuracy is of the published files"
        found.append(Finding("unknown", words, score))
    return tuple(found)


def other_preprocessing(
    base: zoo.Base, stated: Preprocessing
) -> Iterator[tuple[Literal["mean/std", "crop"], str, Preprocessing]]:
    """Other preprocessing, one change at a time; a legacy base keeps its normalisation, which is wrong on purpose."""
    own_norm = base.mean, base.std
    for mean, std in dict.fromkeys([own_norm, *(() if base.legacy else (zoo.IMAGENET, zoo.HALF, zoo.NONE))]):
        if (mean, std) != (stated.mean, stated.std):
            own = "the base's own" if (mean, std) == own_norm else "another base's"
            words = f"stated {zoo.normalisation(stated.mean, stated.std)}; use {own}, {zoo.normalisation(mean, std)}"
            yield "mean/std", words, replace(stated, mean=mean, std=std)
    frame = stated.resize_crop
    if not frame.crop:  # images as stored: the size is not known
        return
    other: Literal["bilinear", "bicubic"] = "bicubic" if frame.interpolation == "bilinear" else "bilinear"
    wider = ResizeCrop(round(frame.crop / 0.875), frame.crop, frame.interpolation)
    tight = ResizeCrop(frame.crop, frame.crop, frame.interpolation)
    own_frame = Preprocessing.of(base).resize_crop
    frames = [own_frame, replace(frame, interpolation=other), replace(frame, direct=not frame.direct), wider, tight]
    for changed in dict.fromkeys(frames):
        if changed != frame:
            yield "crop", f"stated {frame}; use {changed}", replace(stated, resize_crop=changed)


def sample_indices(labels: npt.NDArray[np.int64]) -> list[int]:
    """Indices of a few images of a few classes, evenly spaced over both."""
    kinds = np.unique(labels)
    chosen = kinds[np.linspace(0, len(kinds) - 1, min(SAMPLE_CLASSES, len(kinds))).round().astype(int)]
    rows: list[int] = []
    for kind in chosen:
        each = np.flatnonzero(labels == kind)
        rows += each[np.linspace(0, len(each) - 1, min(SAMPLE_EACH, len(each))).round().astype(int)].tolist()
    return rows


def folder_numbers(data: Images) -> Predictions | None:
    """The class folders' names as numbers, if all are numbers and are not in numerical order; else None."""
    names = data.classes or ()
    if not names or not all(name.isdecimal() for name in names):
        return None
    numbers = np.array([int(name) for name in names], dtype=np.int64)
    return None if bool((numbers == np.arange(len(numbers))).all()) else numbers


def folder_agreement(predictions: Predictions, labels: npt.NDArray[np.int64]) -> float:
    """Percent of images whose prediction is the commonest one among the *other* images of their folder."""
    right = 0
    for kind in np.unique(labels):
        own = predictions[labels == kind]
        for index in range(len(own)):
            others = np.delete(own, index)
            if len(others):
                values, counts = np.unique(others, return_counts=True)
                right += int(values[counts.argmax()] == own[index])
    return 100 * right / len(labels)
