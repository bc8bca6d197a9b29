"""The page of a service in a real Chromium: it shows the streams, and works with a keyboard and in both themes."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")
pytest.importorskip("selenium", reason="pip install selenium")

import uvicorn
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from served import pictures, served

from poem.serve.client import Client
from poem.serve.engine import StreamEngine
from poem.serve.front import build_app
from poem.serve.metrics import Metrics
from poem.serve.settings import ServeSettings

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="no chromium with chromedriver on the path"),
]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    listener, metrics = socket.create_server(("127.0.0.1", 0)), Metrics()
    engine = StreamEngine(served(), ServeSettings(batch_size=4), tmp_path / "states", metrics)
    server = uvicorn.Server(uvicorn.Config(build_app(engine, metrics), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(60)


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1500,700"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options, webdriver.ChromeService(str(DRIVER)))
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
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        script = "return getComputedStyle(document.documentElement).getPropertyValue('--mark')"
        colours.append(browser.execute_script(script))
    assert colours[0] != colours[1]
    complaints = [each for each in browser.get_log("browser") if "favicon" not in each["message"]]  # type: ignore[no-untyped-call]
    assert complaints == []


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
    said = browser.get_log("browser")  # type: ignore[no-untyped-call]
    assert [each for each in said if "favicon" not in each["message"]] == []
