"""The block map shows the state of 4,096 blocks as the worker reports it, and highlights a request's block table."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Page, Route, expect

from shared.kv_snapshot import KVSnapshot
from tests.browser.conftest import (
    BLOCK_SIZE,
    MODEL,
    NUM_BLOCKS,
    NUM_HOST_BLOCKS,
    QUICK_STEP_SECONDS,
    SLOW_STEP_SECONDS,
    Stack,
    eventually,
)
from tests.browser.test_playground import ask

READ_MAP = Path(__file__).with_name("read_map.js").read_text()
NAMES = {"p": "line", "f": "free", "c": "cached", "a": "active", "s": "shared"}
HOST_NAMES = {**NAMES, "a": "swapped", "s": "swapped"}


def colors(page: Page, canvas: str = "map", num_blocks: int = NUM_BLOCKS) -> list[str]:
    return [inside for inside, _ in page.evaluate(READ_MAP, canvas)[:num_blocks]]


def lit(page: Page) -> set[int]:
    """Return the blocks that have a frame in the selection color."""
    return {block for block, (_, edge) in enumerate(page.evaluate(READ_MAP, "map")) if edge == "picked"}


def states(stack: Stack, pool: str = "device") -> str:
    return str(stack.kv()[pool]["states"])


def begin_completion(page: Page, **fields: Any) -> None:
    """Send a request from the page and leave its answer unread."""
    body = json.dumps({"model": MODEL, "prompt": "the user", "ignore_eos": True, "stream": True, **fields})
    page.evaluate(
        "([headers, body]) => { fetch('v1/completions', {method: 'POST', headers, body}); }",
        [{"Content-Type": "application/json"}, body],
    )


@pytest.mark.parametrize("page", ["light", "dark"], indirect=True)
def test_block_map_colors_match_worker_states(page: Page, stack: Stack) -> None:
    ask(page, "the capital of France is Paris, the end", max_tokens="1900", temperature="1", seed="7", n="4")
    eventually(lambda: len(stack.kv()["sequences"]) == 4 and stack.kv()["device"]["num_active_blocks"] > 40)
    stack.pace(SLOW_STEP_SECONDS)
    eventually(lambda: colors(page) == [NAMES[letter] for letter in states(stack)])
    seen = set(colors(page))
    assert {"line", "free", "active", "shared"} <= seen
    assert len(states(stack)) == NUM_BLOCKS
    before = colors(page)
    stack.pace(QUICK_STEP_SECONDS)
    eventually(lambda: colors(page) != before)  # the map updates live
    page.locator("#stop").click()
    # before that, page and worker could agree on more states
    eventually(lambda: set(colors(page)) == {"line", "free", "cached"})
    assert colors(page) == [NAMES[letter] for letter in states(stack)]


def test_selected_request_highlights_its_block_table(page: Page, stack: Stack) -> None:
    ask(page, "the user and the assistant", max_tokens="1900", temperature="1", seed="9", n="2")
    eventually(lambda: stack.kv()["device"]["num_active_blocks"] > 6)
    stack.pace(SLOW_STEP_SECONDS)
    button = page.locator("#requests button").nth(1)
    name = button.text_content()
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")

    def table() -> set[int]:
        return {block for sequence in stack.kv()["sequences"] if f"{sequence['request_id'][:12]}#{sequence['choice']}"
                == name for block in sequence["block_table"]}  # fmt: skip

    eventually(lambda: lit(page) == table() != set())
    expect(button).to_be_focused()  # focus survives all snapshots since the click
    page.keyboard.press("Enter")
    eventually(lambda: lit(page) == set())


def test_block_hover_shows_its_state_and_selects_its_requests(page: Page, stack: Stack) -> None:
    ask(page, "the user and the assistant of the user", max_tokens="1900", temperature="1", seed="11", n="2")
    eventually(lambda: stack.kv()["device"]["num_active_blocks"] > 6)
    stack.pace(SLOW_STEP_SECONDS)
    eventually(lambda: colors(page) == [NAMES[letter] for letter in states(stack)])
    shared, size = states(stack).index("s"), int(page.locator("#map").get_attribute("data-size") or "")
    columns = int(page.locator("#map").get_attribute("data-columns") or "")
    page.locator("#map").hover(position={"x": shared % columns * size + 3, "y": shared // columns * size + 3})
    tip = page.locator("#tip")
    expect(tip).to_contain_text(f"Block {shared}: shared, 2 references")
    expect(tip).to_contain_text(f"{BLOCK_SIZE} of {BLOCK_SIZE} slots filled")
    page.locator("#map").focus()
    page.keyboard.press("End")
    expect(tip).to_have_text(f"Block {NUM_BLOCKS - 1}: free")
    page.keyboard.press("Home")
    expect(tip).to_have_text("Block 0: padding")
    page.locator("#map").click(position={"x": shared % columns * size + 3, "y": shared // columns * size + 3})
    eventually(lambda: shared in lit(page))


def test_host_blocks_are_shown(page: Page, stack: Stack) -> None:
    expect(page.locator("#host")).to_be_visible()
    eventually(lambda: colors(page, "host_map", NUM_HOST_BLOCKS) == [HOST_NAMES[x] for x in states(stack, "host")])
    assert len(states(stack, "host")) == NUM_HOST_BLOCKS


def test_block_copies_flash_and_enter_the_timeline(page: Page, stack: Stack) -> None:
    stack.pace(SLOW_STEP_SECONDS)
    begin_completion(page, max_tokens=1900, temperature=0, use_beam_search=True, n=4)
    eventually(lambda: "flash" in colors(page))
    expect(page.locator("#timeline")).to_have_attribute("aria-label", re.compile(r"[1-9]\d* copied"))
    expect(page.locator("#events li").first).to_contain_text("a shared block is written to")


def snapshot_of(worker: str) -> str:
    snapshot = KVSnapshot(worker=worker, block_size=16, states="pff", requests=[], events=[])
    return f"data: {msgspec.json.encode(snapshot).decode()}\n\n"


def test_restarted_worker_replaces_its_earlier_life_and_a_silent_one_leaves(page: Page) -> None:
    """Workers of `serve` are named by their place and life; those of others only by an id."""
    workers = ["serve.f.0-0.a", "serve.f.1-0.b", "host-17.c", "serve.f.0-1.d"]
    body = "".join(map(snapshot_of, workers))
    is_silent = False

    def answer(route: Route) -> None:
        if not is_silent:  # otherwise the stream stays open
            route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/debug/kv/stream*", answer)
    page.reload()
    expect(page.locator("#worker option")).to_have_text(["host-17.c", "serve.f.0-1.d", "serve.f.1-0.b"])
    is_silent = True
    expect(page.locator("#worker option")).to_have_text(["waiting for workers"], timeout=9_000)
