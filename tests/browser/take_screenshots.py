"""Take the pictures of the page in docs/images: `python -m tests.browser.take_screenshots [URL]`.

The server must run the demo model. Pictures of a tool call and of thoughts have given answers.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Page, expect, sync_playwright

from tests.browser.test_conversations import answer_with, words

IMAGES = Path(__file__).parents[2] / "docs" / "images"
STORY = "Tell me a story about a lighthouse keeper and his dog."
EXPLAINED = (
    "A block table maps **logical** blocks to *physical* ones:\n\n"
    "```python\ndef slot(table, position, size=16):\n"
    "    return table[position // size] * size + position % size\n```\n\n"
    "| position | block | slot |\n|---|---|---|\n| 0 | 0 | 0 |\n| 17 | 1 | 1 |\n"
)


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for picture in PICTURES:
            context = browser.new_context(
                color_scheme=picture.scheme, viewport={"width": picture.width, "height": picture.height}
            )
            page = context.new_page()
            page.goto(url)
            expect(page.locator("#state")).to_have_text("ready", timeout=120_000)
            expect(page.locator("#worker")).to_be_enabled()
            picture.prepare(page)
            page.screenshot(path=IMAGES / picture.name)
            context.close()
        browser.close()


def ask(page: Page, text: str, **settings: str) -> None:
    page.locator("#settings summary").click()
    for name, value in settings.items():
        page.locator(f"#{name}").fill(value)
    page.locator("#settings summary").click()
    page.locator("#prompt").fill(text)
    page.locator("#send").click()


def show_story(page: Page) -> None:
    """Show an answer and the blocks of its request, in the middle of its generation."""
    ask(page, STORY, max_tokens="400", temperature="0.7", seed="5")
    _select_request(page, 0)


def show_choices(page: Page) -> None:
    ask(page, STORY, max_tokens="400", temperature="0.7", n="4", seed="5")
    _select_request(page, 1)


def show_tool_call(page: Page) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "C"}'}}
    answer_with(page, [{"tool_calls": [call]}])
    ask(page, "What is the weather in Paris?")
    expect(page.locator(".results")).to_be_visible()


def show_reasoning(page: Page) -> None:
    answer_with(page, [{"reasoning": "They ask for block tables.\nAn example in code will help."}, *words(EXPLAINED)])
    ask(page, "How does a block table work?")
    page.locator(".thoughts summary").click()
    expect(page.locator("#status")).to_have_text("Answer complete.")


def show_error(page: Page) -> None:
    ask(page, STORY, max_tokens="100000")
    expect(page.locator(".message.error")).to_be_visible()


def _select_request(page: Page, number: int) -> None:
    page.wait_for_timeout(4_000)  # a picture in the middle of an answer that takes ten seconds
    page.locator("#requests button").nth(number).click()
    page.wait_for_timeout(300)


@dataclass(frozen=True)
class Picture:
    name: str
    prepare: Callable[[Page], None]
    width: int = 1440
    height: int = 900
    scheme: Literal["light", "dark"] = "light"


PICTURES = (
    Picture("page.png", show_story),
    Picture("page-dark.png", show_story, scheme="dark"),
    Picture("page-mobile.png", show_reasoning, width=390, height=844),
    Picture("page-wide.png", show_choices, width=1920, height=1000),
    Picture("page-choices.png", show_choices),
    Picture("page-tool-call.png", show_tool_call),
    Picture("page-reasoning.png", show_reasoning),
    Picture("page-error.png", show_error),
)


if __name__ == "__main__":
    main()
