"""Values as JSON can carry them: it has no NaN and no Infinity, and its text is UTF-8."""

from __future__ import annotations

import math
from typing import Any


def json_safe(value: Any) -> Any:
    """The value with None for each number that is not finite, and `?` for what no UTF-8 text can hold.

    A diverged network, a signal that is not known yet or a state from elsewhere brings such values; an encoder of
    strict JSON raises for them.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {json_safe(key): json_safe(each) for key, each in value.items()}
    return [json_safe(each) for each in value] if isinstance(value, list | tuple) else value
