"""Verify a base: compare its source accuracy with the known one, and diagnose a difference.

Most failed reproductions have one of four causes: weights, mean and std, resize and crop, label order. Each is tried on
the same small sample, so that the comparison is paired and a few hundred images suffice.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poem import zoo
from poem.zoo.diagnosis import Finding, ProgressWrapper, diagnose
from poem.zoo.predictions import Preprocessing, class_mask, predict_classes

if TYPE_CHECKING:
    from poem.streams.card import Card
    from poem.streams.images import Images


@dataclass(frozen=True)
class Verification:
    """A measured source accuracy, the known one, and the findings where they differ."""

    accuracy: float
    images: int
    known: zoo.KnownAccuracy | None
    allowed: float
    """Allowed difference in points: the known tolerance, plus two standard errors if only a part was measured."""
    findings: tuple[Finding, ...]
    card: Card
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the accuracy is within the allowed difference, or unknown, and nothing was found."""
        agrees = self.known is None or abs(self.accuracy - self.known.accuracy) <= self.allowed
        return agrees and not self.findings

    def __str__(self) -> str:
        """The accuracy, the known one, one line per finding, and pass or FAIL."""
        lines = [f"source accuracy {self.accuracy:.2f} % of {self.images} images in {self.seconds:.0f} s"]
        if self.known is None:
            lines[0] += "; nothing is known to compare it with"
        else:
            lines.append(f"known {self.known}; {self.allowed:.1f} points allowed")
        lines += [str(finding) for finding in self.findings]
        return "\n".join([*lines, "pass" if self.passed else "FAIL"])

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
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
    watch: ProgressWrapper = lambda indices, words: indices,
) -> Verification:
    """Measure a base's source accuracy on a data set, compare it with the known one, and diagnose a difference.

    Args:
        name: One of `zoo.bases()`.
        data: A name of `poem.streams.datasets`, a folder or tar of class folders, or a data set.
        root: Folder of named data; by default $POEM_DATA.
        weights: As in `zoo.load`.
        mean: Mean to use instead of the base's own, with `std`, as your code does.
        std: Std to use instead of the base's own.
        limit: Number of images, chosen by a fixed permutation; by default all.
        corruption: One of ImageNet-C's or CIFAR-C's; by default the mean over all fifteen.
        severity: Severity of the corruption.
        under: Folder inside an archive that holds the class folders.
        batch_size: Images per forward pass.
        device: Device to run on.
        watch: Wraps the indices of a pass, for a progress bar.
    """
    if (mean is None) != (std is None):
        raise ValueError("expected --mean and --std together, got one of them")
    if limit is not None and limit < 1:
        raise ValueError(f"expected a limit of at least 1, got {limit}")
    start = time.perf_counter()
    domains = [data] if not isinstance(data, str) else list(open_domains(data, root, corruption, severity, under))
    model, base = zoo.load(name, weights)
    model.to(device)
    preprocessing = Preprocessing.of(base)
    if mean is not None and std is not None:
        preprocessing = replace(preprocessing, mean=mean, std=std)
    scores, images = [], 0
    for each in domains:
        mask = class_mask(each, base)
        order = subset_indices(len(each), limit)
        words = f"{each.describe()['data']} {each.describe()['corruption']}"
        predicted = predict_classes(model, each, watch(order, words), preprocessing, mask, batch_size)
        scores.append(100 * float((predicted == each.labels[order]).mean()))
        images += len(order)
    accuracy = sum(scores) / len(scores)
    known = known_accuracy(base, domains)
    part = limit is not None and limit < len(domains[0])
    share = min(max(accuracy / 100, 0.01), 0.99)
    allowed = (known.tolerance if known else 0.0) + (200 * math.sqrt(share * (1 - share) / images) if part else 0.0)
    findings: tuple[Finding, ...] = ()
    off = known is not None and abs(accuracy - known.accuracy) > allowed
    if off or known is None or preprocessing != Preprocessing.of(base):
        easiest = domains[scores.index(max(scores))]  # where a cause changes the accuracy most
        mask = class_mask(easiest, base)
        findings = diagnose(model, base, easiest, preprocessing, mask, batch_size, mismatch=off, watch=watch)
    card = protocol_card(base, preprocessing, domains, images, batch_size, weights)
    return Verification(round(accuracy, 3), images, known, allowed, findings, card, time.perf_counter() - start)


def open_domains(
    name: str, root: str | os.PathLike[str] | None, corruption: str | None, severity: int, under: str | None
) -> Iterator[Images]:
    """Open the data set of that name, once per corruption; images as stored, so that crops can be compared."""
    from poem.streams import datasets
    from poem.streams.datasets.named_sets import CLEAN_COUNTERPARTS, NAMED_SETS
    from poem.streams.shift import CORRUPTIONS

    as_stored: dict[str, Any] = {"prepare": datasets.Prepare()}
    folder = Path(name).expanduser()
    if folder.exists() and name not in datasets.DATASETS:
        if corruption is not None:
            raise ValueError(f"expected imagenet-c, cifar10-c or cifar100-c with a corruption, got the folder {name}")
        yield datasets.image_folder(folder, under=under, **as_stored)
        return
    name = datasets.canonical(name)
    if name in CLEAN_COUNTERPARTS:
        for each in CORRUPTIONS if corruption is None else (corruption,):
            extra = as_stored if name == "imagenet-c" else {}
            yield datasets.open_dataset(name, root, corruption=each, severity=severity, **extra)
    elif corruption is not None:
        raise ValueError(f"expected imagenet-c, cifar10-c or cifar100-c with a corruption, got {name}")
    else:
        yield datasets.open_dataset(name, root, **(as_stored if name in (*NAMED_SETS, "folder", "archive") else {}))


def subset_indices(count: int, limit: int | None) -> list[int]:
    """All indices, or `limit` of them by a fixed permutation, in ascending order."""
    if limit is None or limit >= count:
        return list(range(count))
    return sorted(np.random.RandomState(0).permutation(count)[:limit].tolist())


def known_accuracy(base: zoo.Base, domains: Sequence[Images]) -> zoo.KnownAccuracy | None:
    """The base's known accuracy on this data, or None."""
    about = domains[0].describe()
    what = "mean of 15" if len(domains) == 15 else about["corruption"]
    asked = about["data"], what, about["severity"]
    return next((k for k in base.known if (k.data, k.corruption, k.severity) == asked), None)


def protocol_card(
    base: zoo.Base,
    preprocessing: Preprocessing,
    domains: Sequence[Images],
    images: int,
    batch_size: int,
    weights: str | os.PathLike[str] | None,
) -> Card:
    """The protocol card of the measurement."""
    from poem.streams.card import Card

    about = [each.describe() for each in domains]
    tag = base.tag if weights is None else f"{base.tag}, weights {weights}"
    complete = images == sum(len(each) for each in domains)
    return Card(
        data=about[0]["data"],
        n=images // len(domains),
        total=images,
        subset=about[0]["subset"] if complete else f"{images // len(domains)} of {len(domains[0])}, permutation seed 0",
        classes=about[0]["classes"],
        corruptions=tuple(each["corruption"] for each in about),
        severity=tuple(sorted({each["severity"] for each in about})),
        order="as stored; source model, nothing adapts",
        batch_size=batch_size,
        base=f"{base.name} ({base.kind} {tag})",
        normalisation=zoo.normalisation(preprocessing.mean, preprocessing.std),
        provenance=about[0]["provenance"],
        preparation=str(preprocessing.resize_crop),
    )
