"""docs/demo.png: the top of the page that `poem demo` writes, in a real Chromium.

    poem demo --out poem-demo --json results/demo.json
    python benchmarks/demo_screenshot.py poem-demo/report.html

Needs selenium, chromium and chromedriver. The picture holds the SHA-256 of results/demo.json, so that a test sees
when it is of other numbers than those of the README.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).parent.parent
PICTURE, NUMBERS = ROOT / "docs" / "demo.png", ROOT / "results" / "demo.json"
WIDTH, COLOURS = 1180, 96
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def screenshot(page: Path) -> bytes:
    """The page in light colours from its top to the end of the bars, as PNG."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("expected chromium and chromedriver on the path")
    options.binary_location = chromium
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            light = [{"name": "prefers-color-scheme", "value": "light"}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": light})
            size = {"width": WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            driver.get(page.resolve().as_uri())
            end = driver.execute_script(
                "return document.querySelector('section figure').getBoundingClientRect().bottom"
            )
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": round(end) + 12, "scale": 1.25}
            asked = {"format": "png", "captureBeyondViewport": True, "clip": clip}
            return base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", asked)["data"])
        finally:
            driver.quit()


def main() -> None:
    """Take the picture and write it with few colours, which is half the size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="report.html of poem demo")
    picture = Image.open(io.BytesIO(screenshot(parser.parse_args().page))).convert("RGB")
    about = PngInfo()
    about.add_text("demo.json", hashlib.sha256(NUMBERS.read_bytes()).hexdigest())
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(PICTURE, optimize=True, pnginfo=about)
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
