"""Images of the training distribution from a folder, for guards' shift alarms and for methods that measure them."""

from __future__ import annotations

from pathlib import Path

import torch

from poem.guarded.source_images import SourceImages
from poem.predict import find_images
from poem.streams.loading.prepare import Prepare


def source_images(folder: Path, prepare: Prepare, most: int) -> SourceImages:
    """Up to so many image files under a folder, spread evenly over their names, prepared as the service's images.

    Raises:
        ValueError: An image that cannot be read, or images of several sizes.
        FileNotFoundError: There is no such folder, or there are no images under it.
    """
    files = find_images(folder)
    count = min(most, len(files))
    chosen = [files[at * len(files) // count] for at in range(count)]
    found = [prepare(path.read_bytes(), str(path)) for path in chosen]
    for path, each in zip(chosen, found, strict=True):
        if each.shape != found[0].shape:
            raise ValueError(
                f"expected source images of one size, got {tuple(each.shape[1:])} in {path} and "
                f"{tuple(found[0].shape[1:])} in {chosen[0]}; add --crop"
            )
    return SourceImages(torch.stack(found))
