"""The page in a real Chromium: it opens without a complaint, sorts, switches, fits a phone and follows the theme."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
pytest.importorskip("selenium", reason="pip install selenium")

import torch
from browser import CHROMIUM, DRIVER, complaints, luminance, set_scheme, set_size
from fixture_reports import everything, table
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from poem.report import build
from poem.report.pictures import Example, Picture, png

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="no chromium with chromedriver on the path"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One suite of every kind."""
    _, web = build(*everything(), tmp_path_factory.mktemp("page"))
    return web


def first_block(driver: Any, column: int) -> list[str]:
    """A column of table 1's first block, from top to bottom."""
    rows = driver.find_elements(By.CSS_SELECTOR, "table[data-table=table1] tbody:first-of-type tr[data-row]")
    return [row.find_elements(By.CSS_SELECTOR, "th, td")[column].text.split("\n")[0] for row in rows]


def head(driver: Any, name: str) -> Any:
    """The button in a head of table 1."""
    heads = driver.find_elements(By.CSS_SELECTOR, "table[data-table=table1] thead button")
    return next(button for button in heads if button.text.strip() == name)


def sorted_as(button: Any) -> str:
    return str(button.find_element(By.XPATH, "..").get_attribute("aria-sort"))


def test_it_opens_without_a_complaint_and_asks_for_nothing(opened: Any) -> None:
    assert opened.title == "Test-time adaptation, measured"
    assert len(opened.find_elements(By.CSS_SELECTOR, "main section")) == 9
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert complaints(opened) == []


def test_a_click_sorts_inside_the_blocks_and_a_third_gives_the_order_back(opened: Any) -> None:
    printed, column = first_block(opened, 0), 1
    button = head(opened, "Gauss.")
    button.click()
    assert sorted_as(button) == "descending"
    values = [float(text) for text in first_block(opened, column)]
    assert values == sorted(values, reverse=True)
    assert first_block(opened, 0) != printed
    button.click()
    assert sorted_as(button) == "ascending"
    assert [float(text) for text in first_block(opened, column)] == sorted(values)
    button.click()
    assert sorted_as(button) == "none"
    assert first_block(opened, 0) == printed
    assert complaints(opened) == []


@pytest.mark.parametrize("key", [Keys.ENTER, Keys.SPACE])
def test_the_keyboard_sorts_too(opened: Any, key: str) -> None:
    button = head(opened, "Shot")
    opened.execute_script("arguments[0].focus({focusVisible: true})", button)
    button.send_keys(key)
    assert sorted_as(button) == "descending"
    values = [float(text) for text in first_block(opened, 2)]
    assert values == sorted(values, reverse=True)
    assert opened.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert "Sorted by Shot, descending" in opened.find_element(By.ID, "said").get_attribute("textContent")


def test_a_switch_of_the_metric_changes_numbers_heads_and_the_best(opened: Any) -> None:
    accuracy = first_block(opened, 1)
    Select(opened.find_element(By.ID, "metric")).select_by_value("ece")
    errors = first_block(opened, 1)
    assert errors != accuracy
    assert [float(text) for text in errors] == pytest.approx([10 - float(text) / 20 for text in accuracy], abs=0.06)
    line = opened.find_element(By.CSS_SELECTOR, "#table1 .measure").text
    assert line == "Calibration error (ECE), %, lower is better"
    best = opened.find_elements(By.CSS_SELECTOR, "table[data-table=table1] tbody:first-of-type td.n.best:nth-child(2)")
    assert {cell.text.split("\n")[0] for cell in best} == {min(errors, key=float)}
    Select(opened.find_element(By.ID, "metric")).select_by_value("top1")
    assert first_block(opened, 1) == accuracy
    assert complaints(opened) == []


def test_the_papers_numbers_can_be_hidden_and_stand_beside_accuracy_alone(opened: Any) -> None:
    number = opened.find_element(By.CSS_SELECTOR, "#table1 .paper")
    assert number.text == "27.1†"
    Select(opened.find_element(By.ID, "metric")).select_by_value("ece")
    assert not number.is_displayed()
    Select(opened.find_element(By.ID, "metric")).select_by_value("top1")
    assert number.is_displayed()
    opened.find_element(By.ID, "paper").click()
    assert not number.is_displayed()


def test_a_sorted_table_stays_sorted_when_the_metric_changes(opened: Any) -> None:
    head(opened, "Gauss.").click()
    Select(opened.find_element(By.ID, "metric")).select_by_value("nll")
    values = [float(text) for text in first_block(opened, 1)]
    assert values == sorted(values, reverse=True)


def test_the_theme_follows_the_system_and_the_button(opened: Any, page: Path) -> None:
    assert luminance(opened, "body") > 0.9
    button = opened.find_element(By.ID, "theme")
    assert button.text == "Dark mode", "what a press gives"
    button.click()
    assert luminance(opened, "body") < 0.2
    assert button.text == "Light mode"
    opened.get(page.as_uri())
    assert luminance(opened, "body") < 0.2, "remembered"
    assert opened.find_element(By.ID, "theme").text == "Light mode"
    opened.execute_script("localStorage.clear()")
    set_scheme(opened, "dark")
    opened.get(page.as_uri())
    assert luminance(opened, "body") < 0.2
    button = opened.find_element(By.ID, "theme")
    assert button.text == "Light mode", "of a dark system"
    button.click()
    assert luminance(opened, "body") > 0.9
    assert complaints(opened) == []


def test_drawings_change_with_the_theme(opened: Any) -> None:
    ask = "return getComputedStyle(document.querySelector('#fig5 svg text')).fill"
    light = opened.execute_script(ask)
    opened.find_element(By.ID, "theme").click()
    assert opened.execute_script(ask) != light


@pytest.mark.parametrize("width", [390, 320, 768])
def test_nothing_runs_over_the_edge_of_a_narrow_screen(opened: Any, width: int) -> None:
    set_size(opened, width)
    for details in opened.find_elements(By.CSS_SELECTOR, "details"):
        opened.execute_script("arguments[0].open = true", details)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    box = opened.find_element(By.CSS_SELECTOR, "#table1 .scroll")
    assert opened.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", box), "the box scrolls"
    assert opened.execute_script("return getComputedStyle(document.body).fontSize") == "16px"


def test_the_first_stop_of_the_tab_key_leads_to_the_contents(opened: Any) -> None:
    opened.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    link = opened.switch_to.active_element
    assert link.text == "Skip to the contents"
    link.send_keys(Keys.ENTER)
    assert opened.execute_script("return location.hash") == "#contents"


@pytest.fixture
def printed(opened: Any) -> Iterator[Any]:
    """The page as on paper, of a reader with a dark theme."""
    opened.find_element(By.ID, "theme").click()
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    yield opened
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    opened.execute_script("localStorage.clear()")


def test_paper_is_white_and_without_the_bar(printed: Any) -> None:
    assert luminance(printed, "body") == pytest.approx(1)
    assert luminance(printed, "#table1 tbody th") == pytest.approx(1)
    assert not printed.find_element(By.CSS_SELECTOR, ".bar").is_displayed()
    ink = printed.execute_script("return getComputedStyle(document.querySelector('h1')).color")
    assert ink == "rgb(0, 0, 0)"


def test_headers_on_paper_are_text_since_buttons_are_not_repeated(printed: Any) -> None:
    head = "document.querySelector('table[data-table=table1] thead tr:last-child th')"
    assert printed.execute_script(f"return getComputedStyle({head}, '::after').content") == '"Method"'
    assert not printed.find_element(By.CSS_SELECTOR, "table[data-table=table1] thead button").is_displayed()
    pdf = base64.b64decode(printed.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert pdf.startswith(b"%PDF")


def test_folded_parts_are_open_on_paper_and_closed_afterwards(opened: Any) -> None:
    folded = "return document.querySelectorAll('details:not([open])').length"
    before = opened.execute_script(folded)
    assert before > 5
    opened.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert opened.execute_script(folded) == 0
    opened.execute_script("dispatchEvent(new Event('afterprint'))")
    assert opened.execute_script(folded) == before


def test_provenance_is_last_and_folded(opened: Any) -> None:
    facts = opened.find_element(By.CSS_SELECTOR, ".provenance")
    assert not facts.find_element(By.CSS_SELECTOR, "dl").is_displayed()
    assert facts.location["y"] > opened.find_element(By.CSS_SELECTOR, "main section:last-child").location["y"]


def test_the_first_screen_has_the_picture_the_sentences_and_the_bars(chromium: Any, tmp_path: Path) -> None:
    rows = {"No Adapt.": {"Fog": [50.0]}, "Tent": {"Fog": [70.0]}, "SAR": {"Fog": [40.0]}}
    made, reports = table(rows, group="G")
    pixel = png(torch.zeros(3, 32, 32, dtype=torch.uint8))
    example = Example(clean=pixel, corrupted=pixel, truth="4", before="8", after="4")
    shown = Picture(base="digits-bn", shift="fog, severity 4", method="tent", images=384, before=50.0, after=70.0,
                    examples=(example,) * 4)  # fmt: skip
    _, web = build([made], reports, tmp_path, picture=shown)
    set_scheme(chromium, "light")
    for width in (1280, 390):
        set_size(chromium, width)
        chromium.get(web.as_uri())
        assert chromium.execute_script("return document.documentElement.scrollWidth") <= width
        boxes = [chromium.find_element(By.CSS_SELECTOR, each).rect for each in (".picture", ".said", "section svg")]
        tops = [box["y"] for box in boxes]
        assert tops == sorted(tops)
        assert width < 500 or boxes[-1]["y"] + boxes[-1]["height"] < 900, "seen without scrolling"
    assert complaints(chromium) == []


def test_it_works_without_scripts(chromium: Any, page: Path) -> None:
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chromium.get(page.as_uri())
        assert first_block(chromium, 1)[0] == "30.3"
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("light", 1280, "light"), ("dark", 1280, "dark"), ("narrow", 390, "light"), ("print", 794, "light")],
)
def test_pictures_are_taken(opened: Any, page: Path, tmp_path: Path, name: str, width: int, scheme: str) -> None:
    """Into $POEM_SHOTS, for people to look at."""
    set_scheme(opened, scheme)
    if name == "print":
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    set_size(opened, width)
    opened.get(page.as_uri())
    high = opened.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": min(high, 8000), "scale": 1}
    asked = {"format": "png", "captureBeyondViewport": True, "clip": clip}
    picture = base64.b64decode(opened.execute_cdp_cmd("Page.captureScreenshot", asked)["data"])
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    folder = Path(os.environ.get("POEM_SHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.png").write_bytes(picture)
    assert len(picture) > 50_000
