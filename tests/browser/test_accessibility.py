"""Check that axe-core finds no violations: light and dark, idle and busy."""

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import Stack
from tests.browser.test_conversations import answer_with
from tests.browser.test_playground import ask

RICH_ANSWER: list[dict[str, Any]] = [
    {"reasoning": "I should look it up."},
    {"content": "# Title\n\n- [x] done\n\n```python\nprint('hello')  # comment\n```\n\n| a |\n|---|\n| 1 |\n\n[link](https://example.org)"},
    {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": "{}"}}]},
]  # fmt: skip


@pytest.mark.parametrize("page", ["light", "dark"], indirect=True)
def test_page_in_every_state_has_no_axe_violations(page: Page, stack: Stack) -> None:
    axe = Axe()
    empty = axe.run(page)
    assert empty.violations_count == 0, empty.generate_report()
    ask(page, "the user", max_tokens="1900", temperature="1", n="2")
    page.locator("#requests button").first.click()
    page.locator("#map").hover(position={"x": 4, "y": 4})
    expect(page.locator("#tip")).to_be_visible()
    at_work = axe.run(page)
    assert at_work.violations_count == 0, at_work.generate_report()


@pytest.mark.parametrize("page", ["light", "dark"], indirect=True)
def test_answers_errors_and_fleet_have_no_axe_violations(page: Page) -> None:
    answer_with(page, RICH_ANSWER)
    ask(page, "the weather")
    expect(page.locator(".results")).to_be_visible()
    page.locator(".thoughts summary").click()
    page.locator(".message.user .edit").click()
    page.locator("#fleet-tab").click()
    expect(page.locator("#workers meter")).to_be_visible()
    page.unroute("**/v1/chat/completions")
    page.locator("#max_tokens").fill("3000")
    page.locator("#prompt").fill("too long")
    page.locator("#send").click()
    expect(page.locator(".message.error")).to_be_visible()
    report = Axe().run(page)
    assert report.violations_count == 0, report.generate_report()


def test_theme_is_chosen_and_kept(page: Page) -> None:
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.locator("#theme").click()
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_page_on_a_phone_fits_the_screen(page: Page) -> None:
    page.set_viewport_size({"width": 375, "height": 700})
    expect(page.locator("#prompt")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
