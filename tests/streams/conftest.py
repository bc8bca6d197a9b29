"""Files that tests of data sets and of batches share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def cifar_c_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CIFAR-10-C of full shape; its file is sparse, so it costs no room."""
    root = tmp_path_factory.mktemp("data") / "CIFAR-10-C"
    root.mkdir()
    labels = np.tile(np.arange(10_000) % 10, 5).astype(np.uint8)
    np.save(root / "labels.npy", labels)
    rows: Any = np.lib.format.open_memmap(root / "fog.npy", mode="w+", dtype=np.uint8, shape=(50_000, 32, 32, 3))
    for severity in range(1, 6):
        rows[(severity - 1) * 10_000] = severity
        rows[severity * 10_000 - 1, :, :, 2] = 10 * severity
    rows.flush()
    return root
