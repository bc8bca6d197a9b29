"""Standard errors of accuracies and of differences of rows: over images, and over seeds.

The unit is the image. What an image does in one corruption tells something of what it does in the next, so that an
error that took its samples as independent would be too small. Samples of one run are not independent either: every
answer depends on the updates before it. So where there are three seeds or more, an error is the larger of that over
images and that over seeds; one seed cannot tell, and a difference counts from three errors on instead of two.

Accuracies are in percent, differences in points; so are errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev

import numpy as np
from numpy.typing import NDArray

SURE, SURE_OF_ONE = 2.0, 3.0
"""Standard errors from 0 that count as a difference: with an error over seeds, and without."""
SEEDS = 3
"""Seeds that an error over seeds needs."""

Column = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Values of a stream's samples, and the number of the image that each shows."""


def errors_needed(seeds: int) -> float:
    """Standard errors from 0 that count as a difference, with that many seeds."""
    return SURE if seeds >= SEEDS else SURE_OF_ONE


def paired_error(better: int, worse: int, n: int) -> float:
    """Of the difference of two rows on n independent samples, from those that one of the two alone gets right."""
    mean = (better - worse) / n
    return 100 * math.sqrt(max(0.0, (better + worse) / n - mean**2) / n)


def image_error(columns: Sequence[Column]) -> tuple[float, int]:
    """Of the mean of the columns' means, each image being one observation; and the number of images.

    An image counts with all its samples, in one column or in several. With one sample of each image in one column it
    is the usual error: the values' standard deviation by the root of their number.
    """
    _, place = np.unique(np.concatenate([images for _, images in columns]), return_inverse=True)
    parts = [(values - values.mean()) / (len(values) * len(columns)) for values, _ in columns]
    influence = np.bincount(place.ravel(), weights=np.concatenate(parts))
    return 100 * math.sqrt(float((influence**2).sum())), len(influence)


def seed_error(values: Sequence[float]) -> float:
    """Of the mean over seeds; 0 for fewer than three, which tell too little."""
    return stdev(values) / math.sqrt(len(values)) if len(values) >= SEEDS else 0.0
