"""Records of the networks that we trained, and the folder of those that come with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TRAINED = Path(__file__).resolve().parent / "trained"


def recorded(file: str) -> dict[str, Any]:
    """Records of networks that we trained, as `poem train-source` wrote them."""
    path = TRAINED / file
    return json.loads(path.read_text()) if path.is_file() else {}
