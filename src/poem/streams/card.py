"""The protocol card: data, order, seed and preparation of a stream in one block, to see whether two numbers compare."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from poem._util.nearest import nearest_hint


@dataclass(frozen=True, kw_only=True)
class Card:
    """The protocol of one stream. Prints as an aligned block; converts to JSON and back."""

    data: str
    """The data set's name."""
    n: int
    """Number of images in one domain."""
    total: int
    """Number of samples in the whole stream."""
    subset: str = "all"
    """Which images: all, 5k by which list, ..."""
    classes: str = ""
    """Number of classes, with " of 1000" where a mask selects them from the model's."""
    corruptions: tuple[str, ...] = ("clean",)
    severity: tuple[int, ...] = (0,)
    order: str = "as given"
    """Scenario, arrangement and resets."""
    seed: int = 0
    batch_size: int = 64
    base: str = "not stated"
    """The source model: the exact tag of its weights."""
    normalisation: str = "not stated"
    """Mean and std of the normalisation, and where they are applied."""
    source_access: str = "none"
    """What the method uses of the source data: none, statistics, or a number of images."""
    provenance: str = "not stated"
    """Origin of the images: official files or made on the fly, and which frost textures."""
    preparation: str = "as stored"
    """Resize and crop."""

    def __str__(self) -> str:
        rows = [(item.name.replace("_", " "), _text(getattr(self, item.name))) for item in dataclasses.fields(self)]
        wide = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{wide}}  {words}" for name, words in rows)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Card:
        """Make a card from `to_dict`'s values."""
        names = {item.name for item in dataclasses.fields(cls)}
        for key in values:
            if key not in names:
                raise ValueError(f"a card has no field {key!r}; {nearest_hint(key, sorted(names))}")
        missing = {"data", "n", "total"} - set(values)
        if missing:
            raise ValueError(f"expected a card with {', '.join(sorted(missing))}, which it lacks")
        plain: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in values.items()}
        return cls(**plain)

    def to_json(self) -> str:
        """The fields as one JSON object."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Card:
        """Make a card from `to_json`'s text."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"expected a JSON object with a card's fields, got {type(values).__name__}")
        return cls.from_dict(values)


def _text(value: Any) -> str:
    """A value as text; of a tuple of more than six the first three, the last and the number."""
    if not isinstance(value, tuple):
        return str(value)
    words = [str(each) for each in value]
    return ", ".join(words) if len(words) <= 6 else f"{', '.join(words[:3])}, ... {words[-1]} ({len(words)})"
