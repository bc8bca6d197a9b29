"""The 1797 digits that come with scikit-learn: data for a machine without any."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from poem.streams._images import Tensors


def digits(*, size: int = 32) -> Tensors:
    """Handwritten digits, 8x8 grey in 17 levels, enlarged (bilinear) to `size` and repeated over three channels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'poem-tta[demo]'") from error
    if size < 8:
        raise ValueError(f"expected a size of at least 8, got {size}")
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float()[:, None] / 16
    if size != 8:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return Tensors(
        (images * 255).round().to(torch.uint8),
        bunch.target,
        classes=tuple(str(digit) for digit in range(10)),
        name="digits",
        provenance=f"scikit-learn's load_digits (UCI optical digits, test part), 8x8 enlarged to {size}x{size}",
    )
