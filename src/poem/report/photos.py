"""Photos as one page: what adapting changed, and the images that became reliable on the way."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from torch import Tensor

from poem.predict import Answer

BINS = 20
MOST = 48
"""Pictures in a grid."""


@dataclass(frozen=True)
class Shown:
    """A picture with its answer."""

    answer: Answer
    picture: str
    """A data address: the image itself, small."""
    truth: int | None = None
    """The class it is of, numbered as the answer's label, where that is known."""
    true_name: str = ""
    """The same in words."""

    def verdict(self, label: int | None) -> str:
        """Whether a label is right, where that is known."""
        return "" if self.truth is None else " (right)" if label == self.truth else " (wrong)"


def thumbnail(image: Tensor, side: int = 112) -> str:
    """An image (3, H, W) in [0, 1] as a small JPEG inside a data address."""
    from PIL import Image

    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(pixels)
    picture.thumbnail((side, side))
    held = io.BytesIO()
    picture.save(held, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(held.getvalue()).decode()


def histogram(values: Sequence[float], top: float) -> list[float]:
    """Shares of `BINS` equal bins from 0 to `top`."""
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, max(0, int(BINS * value / max(top, 1e-9))))] += 1
    return [count / max(1, len(values)) for count in counts]


def page(
    title: str,
    lines: Sequence[str],
    answers: Sequence[Answer],
    newly: Sequence[Shown],
    changed: Sequence[Shown],
    *,
    top: float,
) -> str:
    """The whole page.

    Args:
        title: What was run.
        lines: The summary.
        answers: All of them, for the curves of entropy.
        newly: Pictures that became reliable.
        changed: Pictures whose answer is not the unadapted model's.
        top: The largest entropy there can be, ln C.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("a page needs jinja2; type: pip install 'poem-tta[demo]'") from error
    read = [each for each in answers if not each.error]
    curves = {
        "unadapted": histogram([each.source_entropy or 0.0 for each in read], top),
        "first look": histogram([each.first_entropy or 0.0 for each in read], top),
        "answer": histogram([each.entropy or 0.0 for each in read], top),
    }
    highest = max((max(curve) for curve in curves.values()), default=0.0) or 1.0
    paths = {
        name: " ".join(
            f"{40 + 560 * (at + 0.5) / BINS:.1f},{170 - 150 * share / highest:.1f}" for at, share in enumerate(curve)
        )
        for name, curve in curves.items()
    }
    folder = resources.files("poem.report")
    template = (folder / "photos.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    grids = [
        (
            "Too uncertain at first, reliable after an update",
            newly,
            "No image that was too uncertain at first became reliable.",
        ),
        ("Another answer than the model's own", changed, "Every answer is the model's own."),
    ]
    return environment.from_string(template).render(
        title=title, lines=lines, paths=paths, top=top, most=MOST, grids=grids,
        style=(folder / "style.css").read_text(encoding="utf-8"),
    )  # fmt: skip
