"""Take the screenshots in docs/images: `python -m tests.browser.take_screenshots [URL]`.

The server must run the demo model. The pictures (light and dark) show four choices of one prompt while they are
generated, with one choice selected.
"""

import sys
from pathlib import Path
from typing import Literal

from playwright.sync_api import Page, expect, sync_playwright

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PICTURES: dict[Literal["light", "dark"], str] = {"light": "page.png", "dark": "page-dark.png"}


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for scheme, name in PICTURES.items():
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1240, "height": 1000})
            page.goto(url)
            take(page, IMAGES / name)
            page.close()
        browser.close()


def take(page: Page, path: Path) -> None:
    expect(page.locator("#state")).to_have_text("ready", timeout=120_000)
    page.locator("summary").click()
    for name, value in {"max_tokens": "400", "temperature": "0.7", "n": "4", "seed": "5"}.items():
        page.locator(f"#{name}").fill(value)
    page.locator("summary").click()
    page.locator("#prompt").fill("Tell me a story about a lighthouse keeper and his dog.")
    page.locator("#send").click()
    expect(page.locator(".message").nth(4).locator("span")).to_contain_text(" ", timeout=60_000)
    expect(page.locator("#requests button")).to_have_count(4)
    page.wait_for_timeout(3_000)  # a picture in the middle of an answer that takes ten seconds
    page.locator("#requests button").nth(1).click()
    page.wait_for_timeout(300)
    page.screenshot(path=path)
    page.locator("#stop").click()
    expect(page.locator("#status")).to_have_text("Stopped.")


if __name__ == "__main__":
    main()
