"""Check that axe-core finds no violations: light and dark, idle and busy."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import Stack
from tests.browser.test_playground import ask


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


def test_page_on_a_phone_fits_the_screen(page: Page) -> None:
    page.set_viewport_size({"width": 375, "height": 700})
    expect(page.locator("#prompt")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
