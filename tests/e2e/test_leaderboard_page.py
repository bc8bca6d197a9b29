"""The leaderboard in a real Chromium: it sorts by click and by key, filters, fits a phone and follows the theme."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jinja2")
pytest.importorskip("selenium", reason="pip install selenium")

from browser import CHROMIUM, DRIVER, complaints, luminance, set_scheme, set_size
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from poem.bench.sample_cells import SampleCell
from poem.report.leaderboard import make_leaderboard
from poem.report.leaderboard_page import render_leaderboard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="no chromium with chromedriver on the path"),
]
ROWS = {"source": (100, 1.0), "tent": (104, 2.5), "poem": (97, 4.0), "eata": (112, 11.0)}
"""Right answers of 200, and seconds."""


def cells() -> Iterator[SampleCell]:
    """Two networks, three streams of one scenario and one of another."""
    for net in ("cifar10-bn", "cifar10-gn"):
        for at, stream in enumerate(("clean", "fog-5", "snow-5", "continual")):
            for row, (right, seconds) in ROWS.items():
                count = right + (at if row == "tent" else 0)
                bits = np.arange(200) < count
                facts = (("command", "python -m study"), ("device", "H200"), ("torch", "2.9"), ("tree", f"{row}tree"))
                yield SampleCell(
                    net=net, row=row, stream=stream, seed=0, batch=64, n=200, right=count, hash=stream, bits=bits,
                    seconds=seconds, protocol="cifar10", provenance=facts,
                    images="repeated" if stream == "continual" else "in order",
                )  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("board") / "leaderboard.html"
    path.write_text(render_leaderboard(make_leaderboard(cells())), encoding="utf-8")
    return path


def column(driver: Any, at: int, block: int = 0) -> list[str]:
    """A column of one of the blocks that are shown, from top to bottom."""
    shown = [each for each in driver.find_elements(By.CSS_SELECTOR, "tbody[data-net]") if each.is_displayed()]
    rows = shown[block].find_elements(By.CSS_SELECTOR, "tr[data-row]")
    return [row.find_elements(By.CSS_SELECTOR, "th, td")[at].text for row in rows if row.is_displayed()]


def head(driver: Any, name: str) -> Any:
    heads = driver.find_elements(By.CSS_SELECTOR, "table.leaderboard thead button")
    return next(button for button in heads if button.text.strip() == name)


def said(driver: Any) -> str:
    return str(driver.find_element(By.ID, "said").get_attribute("textContent"))


def test_it_opens_best_first_without_a_complaint(opened: Any) -> None:
    assert opened.title == "Test-time adaptation: leaderboard"
    assert column(opened, 0) == ["eata", "tent", "source", "poem"]
    assert column(opened, 2)[0].startswith("+6.00 ±")
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert complaints(opened) == []


def test_a_click_sorts_every_block_and_a_third_gives_the_order_back(opened: Any) -> None:
    button = head(opened, "Cost, source = 1")
    for order in (["eata", "poem", "tent", "source"], ["source", "tent", "poem", "eata"]):
        button.click()
        assert column(opened, 0) == column(opened, 0, block=1) == order
    button.click()
    assert column(opened, 0) == ["eata", "tent", "source", "poem"]
    assert complaints(opened) == []


@pytest.mark.parametrize("key", [Keys.ENTER, Keys.SPACE])
def test_the_keyboard_reaches_a_head_and_sorts(opened: Any, key: str) -> None:
    """Tab from the method's box: the theme, the table, its heads."""
    opened.find_element(By.ID, "method").send_keys(Keys.TAB)
    for _ in range(4):
        opened.switch_to.active_element.send_keys(Keys.TAB)
    active = opened.switch_to.active_element
    assert active.text == "To source, points"
    assert opened.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    active.send_keys(key)
    assert active.find_element(By.XPATH, "..").get_attribute("aria-sort") == "descending"
    active.send_keys(key)
    assert column(opened, 0) == ["poem", "source", "tent", "eata"], "ascending; source is 0"
    assert "Sorted by To source, points, ascending" in said(opened)


def test_choices_show_networks_scenarios_and_methods(opened: Any) -> None:
    scenario = Select(opened.find_element(By.ID, "scenario"))
    assert scenario.first_selected_option.text == "One shift at a time, clean and severity 5"
    Select(opened.find_element(By.ID, "net")).select_by_visible_text("cifar10-gn")
    assert said(opened) == "1 of 4 blocks shown"
    scenario.select_by_visible_text("all")
    assert said(opened) == "2 of 4 blocks shown"
    box = opened.find_element(By.ID, "method")
    box.send_keys("POE")
    assert column(opened, 0) == ["source", "poem"]
    box.send_keys("TRY")
    assert opened.find_element(By.ID, "none").is_displayed()
    assert complaints(opened) == []


def test_a_row_leads_to_its_provenance(opened: Any) -> None:
    link = opened.find_element(By.CSS_SELECTOR, "tbody a")
    run = link.text
    link.send_keys(Keys.ENTER)
    target = opened.find_element(By.ID, f"run-{run}")
    assert target.is_displayed()
    assert opened.switch_to.active_element == target
    facts = target.find_element(By.XPATH, "following-sibling::dl[1]").text
    for words in ("eatatree", "H200", "2.9", "python -m study"):
        assert words in facts


def test_the_theme_follows_the_system_and_the_button(opened: Any, page: Path) -> None:
    assert luminance(opened, "body") > 0.9
    opened.find_element(By.ID, "theme").click()
    assert luminance(opened, "body") < 0.2
    opened.execute_script("localStorage.clear()")
    set_scheme(opened, "dark")
    opened.get(page.as_uri())
    assert luminance(opened, "body") < 0.2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_gains_and_losses_differ_in_sign_and_in_contrast_enough_to_read(opened: Any, page: Path, scheme: str) -> None:
    """Signs tell them apart without colour; every colour has 4.5 to 1 against the page."""
    set_scheme(opened, scheme)
    opened.get(page.as_uri())
    ask = "return getComputedStyle(document.querySelector(arguments[0])).color"
    back = luminance_of(opened.execute_script("return getComputedStyle(document.body).backgroundColor"))
    for place, sign in (("td .gain", "+"), ("td .loss", "\u2212"), ("td i", "±"), ("tbody a", "")):
        own = luminance_of(opened.execute_script(ask, place))
        light, dark = max(own, back), min(own, back)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
        assert opened.find_element(By.CSS_SELECTOR, place).text.startswith(sign)


def luminance_of(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [float(word) / 255 for word in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("width", [390, 320, 768])
def test_nothing_runs_over_the_edge_of_a_narrow_screen(opened: Any, width: int) -> None:
    set_size(opened, width)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
