"""The page of a service in a real Chromium: it shows the streams, and works with a keyboard and in both themes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")
pytest.importorskip("selenium", reason="pip install selenium")

from browser import CHROMIUM, DRIVER, chromium_driver, complaints, set_scheme, set_size
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from served import pictures, running, until
from torch import Tensor

from poem.serve.client import Client
from poem.serve.learner import Learner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="no chromium with chromedriver on the path"),
]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with running(tmp_path, batch_size=4) as found:
        yield found


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    made = chromium_driver(tmp_path / "profile")
    set_size(made, 1500)
    yield made
    made.quit()


def test_streams_are_shown_and_opened_with_the_keyboard(url: str, browser: webdriver.Chrome) -> None:
    names = ("door", "yard", "gate")
    with Client(url) as client:
        for seed in range(6):
            for name in names:
                client.predict(name, pictures(4, seed))
    browser.get(url)
    until = time.monotonic() + 20
    while len(browser.find_elements(By.CSS_SELECTOR, "tbody tr")) < 3 and time.monotonic() < until:
        time.sleep(0.2)
    rows = browser.find_elements(By.CSS_SELECTOR, "tbody tr")
    assert {row.find_element(By.TAG_NAME, "button").text for row in rows} == set(names)
    assert all(row.find_elements(By.TAG_NAME, "td")[2].text == "6" for row in rows)
    assert "digits-bn, auto, guarded" in browser.find_element(By.ID, "service").text
    if shot := os.environ.get("POEM_SHOT"):
        browser.save_screenshot(shot)
    first = browser.find_element(By.CSS_SELECTOR, "tbody button")
    name = first.text
    first.send_keys(Keys.ENTER)
    assert browser.find_element(By.ID, "name").text == name
    assert "turns" in browser.find_element(By.ID, "facts").text
    time.sleep(2.5)  # the page has been filled anew
    assert browser.find_element(By.ID, "name").text == name
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not browser.find_element(By.ID, "detail").is_displayed()
    assert browser.switch_to.active_element.text == name
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert browser.switch_to.active_element.text != name
    colours = []
    for theme in ("light", "dark"):
        set_scheme(browser, theme)
        script = "return getComputedStyle(document.documentElement).getPropertyValue('--mark')"
        colours.append(browser.execute_script(script))
    assert colours[0] != colours[1]
    assert [each for each in complaints(browser) if "favicon" not in each] == []


def shown(browser: webdriver.Chrome, count: int) -> list[list[str]]:
    """The rows of the table, once there are so many, or after 20 seconds."""
    until = time.monotonic() + 20
    while True:
        rows = browser.execute_script(
            "return [...document.querySelectorAll('tbody tr')]"
            ".map(row => [...row.cells].map(cell => cell.innerText.trim()))"
        )
        if len(rows) == count or time.monotonic() > until:
            found: list[list[str]] = rows
            return found
        time.sleep(0.1)


def points(browser: webdriver.Chrome) -> str:
    """Those of the first curve of the stream that is open; read at once, since the page makes it anew."""
    script = "return document.querySelector('#charts polyline')?.getAttribute('points') ?? ''"
    found: str = browser.execute_script(script)
    return found


def test_columns_sort_streams_are_found_and_values_are_curves(url: str, browser: webdriver.Chrome) -> None:
    with Client(url) as client:
        for name, batches in (("cam-2", 3), ("cam-10", 5), ("yard", 1)):
            for seed in range(batches):
                client.predict(name, pictures(4, seed))
        browser.get(url)
        assert [row[0] for row in shown(browser, 3)] == ["cam-2", "cam-10", "yard"], "by number, not by letter"
        heads = {each.text: each for each in browser.find_elements(By.CSS_SELECTOR, "th button")}
        heads["batches"].send_keys(Keys.ENTER)
        assert [row[2] for row in shown(browser, 3)] == ["5", "3", "1"]
        assert browser.find_element(By.CSS_SELECTOR, "th[aria-sort=descending]").text.startswith("batches")
        browser.switch_to.active_element.send_keys(Keys.ENTER)
        assert [row[2] for row in shown(browser, 3)] == ["1", "3", "5"]
        browser.find_element(By.ID, "filter").send_keys("cam")
        assert {row[0] for row in shown(browser, 2)} == {"cam-2", "cam-10"}
        assert not browser.find_element(By.ID, "token").is_displayed(), "this service has no token"
        browser.find_element(By.CSS_SELECTOR, "button[data-stream=cam-10]").send_keys(Keys.ENTER)
        for seed in range(3):
            client.predict("cam-10", pictures(4, seed))
    until(lambda: len(points(browser).split()) >= 3)  # one more whenever the page has read the status
    assert "NaN" not in points(browser)
    names = "return [...document.querySelectorAll('#charts figure')].map(each => each.innerText.split(':')[0].trim())"
    assert set(browser.execute_script(names)) == {
        "agreement", "entropy", "selected", "newly reliable", "drift", "latency ms"
    }  # fmt: skip
    assert [each for each in complaints(browser) if "favicon" not in each] == []


def test_a_stream_that_has_not_answered_yet_says_so(
    url: str, browser: webdriver.Chrome, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, answer = threading.Event(), Learner.answer

    def wait(self: Learner, images: Tensor) -> Any:
        gate.wait(60)
        return answer(self, images)

    monkeypatch.setattr(Learner, "answer", wait)
    asked = threading.Thread(target=Client(url).predict, args=("door", pictures(4, 0)))
    asked.start()
    try:
        browser.get(url)
        until = time.monotonic() + 20
        while not browser.find_elements(By.CSS_SELECTOR, "tbody button") and time.monotonic() < until:
            time.sleep(0.1)
        browser.find_element(By.CSS_SELECTOR, "tbody button").click()
        assert "no answer yet; audit" in browser.find_element(By.ID, "facts").text
        assert "undefined" not in browser.find_element(By.TAG_NAME, "body").text
    finally:
        gate.set()
        asked.join(60)


def test_a_token_is_asked_for_where_the_service_has_one(tmp_path: Path, browser: webdriver.Chrome) -> None:
    with running(tmp_path, "a-long-secret") as url:
        browser.get(url)
        until = time.monotonic() + 20
        while not browser.find_element(By.ID, "token").is_displayed() and time.monotonic() < until:
            time.sleep(0.1)
        assert "Bearer" in browser.find_element(By.ID, "service").text
        browser.find_element(By.ID, "token").send_keys("a-long-secret")
        while "guarded" not in browser.find_element(By.ID, "service").text and time.monotonic() < until:
            time.sleep(0.1)
        assert "digits-bn, auto, guarded" in browser.find_element(By.ID, "service").text


def test_the_routes_are_shown_from_the_services_own_schema(url: str, browser: webdriver.Chrome) -> None:
    browser.get(f"{url}/docs")
    until = time.monotonic() + 20
    while not browser.find_elements(By.CSS_SELECTOR, "section") and time.monotonic() < until:
        time.sleep(0.1)
    heads = [each.text for each in browser.find_elements(By.CSS_SELECTOR, "section h2")]
    assert any("POST" in head and "/v1/streams/{stream}/predict" in head for head in heads), heads
    assert len(heads) >= 10
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert all(name.startswith(url) for name in loaded), loaded
    assert [each for each in complaints(browser) if "favicon" not in each] == []
