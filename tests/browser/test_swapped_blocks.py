"""The page shows where the KV of a preempted request is: host block map, request table and timeline."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import QUICK_STEP_SECONDS, Stack, eventually, running_stack
from tests.browser.test_block_map import HOST_NAMES, begin_completion, colors, states

NUM_BLOCKS, NUM_HOST_BLOCKS = 17, 33  # 16 usable device blocks: each of two requests needs 13
STILL_STEP_SECONDS = 0.5  # the running request has 70 tokens to go until the other one resumes


@pytest.fixture(scope="module")
def stack_processes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("swapping"), request.config, NUM_BLOCKS, NUM_HOST_BLOCKS) as stack:
        yield stack


def test_swapped_blocks_have_their_color_until_swap_in(page: Page, stack: Stack) -> None:
    for seed in (1, 2):
        begin_completion(page, max_tokens=200, temperature=1, seed=seed)
    eventually(lambda: any(sequence["host_block_table"] for sequence in stack.kv()["sequences"]))
    stack.pace(STILL_STEP_SECONDS)
    eventually(lambda: "a" in states(stack, "host"))
    eventually(lambda: colors(page, "host_map", NUM_HOST_BLOCKS) == [HOST_NAMES[x] for x in states(stack, "host")])
    (swapped,) = (sequence for sequence in stack.kv()["sequences"] if sequence["host_block_table"])
    assert colors(page, "host_map", NUM_HOST_BLOCKS).count("swapped") == len(swapped["host_block_table"]) > 0
    name = f"{swapped['request_id'][:12]}#0"
    expected = [name, "swapped", str(swapped["num_tokens"]), "0", str(len(swapped["host_block_table"]))]
    expect(page.locator(f"#requests tr[data-id='{name}'] td")).to_have_text(expected)
    page.locator("#host_map").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#host_tip")).to_contain_text(f"Block 1: {HOST_NAMES[states(stack, 'host')[1]]}")
    expect(page.locator("#timeline")).to_have_attribute("aria-label", re.compile(r"[1-9]\d* preempted, 0 restored"))
    expect(page.locator("#events")).to_contain_text("swap")
    stack.pace(QUICK_STEP_SECONDS)
    expect(page.locator("#timeline")).to_have_attribute("aria-label", re.compile(r"[1-9]\d* restored"))
    eventually(lambda: "swapped" not in colors(page, "host_map", NUM_HOST_BLOCKS))
