"""A browser for the tests of pages, shared by those of a file; each has a fixture `page`, the file to open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium_driver, set_scheme, set_size


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser with a fresh profile."""
    driver = chromium_driver(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def opened(chromium: Any, page: Path) -> Any:
    """The page, wide, light and as printed."""
    set_scheme(chromium, "light")
    set_size(chromium, 1280)
    chromium.get(page.as_uri())
    chromium.execute_script("localStorage.clear()")
    chromium.get(page.as_uri())
    return chromium
