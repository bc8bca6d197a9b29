"""The page of `poem demo imagenet`: answers before and after, changed predictions, photos that became reliable."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from poem._util.files import without_controls
from poem.predict import Answer

BINS = 20
MAX_PHOTOS = 48
"""Most photos that a grid shows."""
FIRST = 4
"""Most photos that the page begins with."""


@dataclass(frozen=True)
class Photo:
    """A photo with its prediction."""

    answer: Answer
    thumbnail: str
    """A small JPEG as a data URL."""
    true_label: int | None = None
    """The true class, numbered as the answer's label, where it is known."""
    true_name: str = ""
    """Name of the true class."""
    clean: str = ""
    """The photo without the corruption, as another data URL; empty where there is none."""

    @property
    def corrected(self) -> bool:
        """Whether the true class is known, and answered now but not by the model unadapted."""
        return self.true_label is not None and self.answer.source_label != self.true_label == self.answer.label

    def right_or_wrong(self, label: int | None) -> str:
        """` (right)` or ` (wrong)` for a predicted label, or nothing where the true one is not known."""
        return "" if self.true_label is None else " (right)" if label == self.true_label else " (wrong)"


def thumbnail(image: Tensor, side: int = 112) -> str:
    """An image (3, H, W) in [0, 1] as a small JPEG in a data URL."""
    from PIL import Image

    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(pixels)
    picture.thumbnail((side, side))
    return _jpeg(picture)


def _jpeg(picture: Any) -> str:
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(jpeg.getvalue()).decode()


def file_thumbnail(path: Path, side: int = 112) -> str:
    """The middle of a photo's file as a small JPEG in a data URL."""
    from PIL import Image, ImageOps

    with Image.open(path) as opened:
        picture = ImageOps.fit(ImageOps.exif_transpose(opened).convert("RGB"), (side, side))
    return _jpeg(picture)


def first_photos(changed: Sequence[Photo]) -> list[Photo]:
    """The photos that a page begins with: those that are right only now, or without labels those that changed."""
    return ([each for each in changed if each.corrected] or list(changed))[:FIRST]


def histogram(values: Sequence[float], top: float) -> list[float]:
    """The share of values in each of `BINS` equal bins from 0 to `top`."""
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, max(0, int(BINS * value / max(top, 1e-9))))] += 1
    return [count / max(1, len(values)) for count in counts]


def photo_page(
    title: str,
    lines: Sequence[str],
    answers: Sequence[Answer],
    newly: Sequence[Photo],
    changed: Sequence[Photo],
    *,
    max_entropy: float,
) -> str:
    """Render the page as HTML.

    Args:
        title: Method, photos and model.
        lines: The summary.
        answers: All predictions, for the curves of entropy.
        newly: Photos that were selected only after an update.
        changed: Photos whose prediction is not the unadapted model's.
        max_entropy: The largest possible entropy, ln C.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("a page needs jinja2; type: pip install 'poem-tta[demo]'") from error
    read = [each for each in answers if not each.error]
    curves = {
        "unadapted": histogram([each.source_entropy or 0.0 for each in read], max_entropy),
        "before the updates": histogram([each.first_entropy or 0.0 for each in read], max_entropy),
        "answer": histogram([each.entropy or 0.0 for each in read], max_entropy),
    }
    highest = max((max(curve) for curve in curves.values()), default=0.0) or 1.0
    paths = {
        name: " ".join(
            f"{40 + 560 * (at + 0.5) / BINS:.1f},{170 - 150 * share / highest:.1f}" for at, share in enumerate(curve)
        )
        for name, curve in curves.items()
    }
    folder = resources.files("poem.report")
    template = (folder / "photo_page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    grids = [
        ("Another answer than the model's own", changed, "Every answer is the model's own."),
        (
            "Too uncertain at first, reliable after an update",
            newly,
            "No image that was too uncertain at first became reliable.",
        ),
    ]
    text = environment.from_string(template).render(
        title=title, lines=lines, paths=paths, max_entropy=max_entropy, max_photos=MAX_PHOTOS, grids=grids,
        first=first_photos(changed),
        style=(folder / "style.css").read_text(encoding="utf-8"),
    )  # fmt: skip
    return without_controls(str(text))
