"""Conversations: what is kept after a stop, a reload and an edit, and how answers are drawn.

Answers with given text come from `answer_with()`, in place of the gateway.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import SLOW_STEP_SECONDS, Stack, eventually
from tests.browser.test_playground import ask, sent_messages

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def chunk(delta: dict[str, Any], index: int = 0, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish_reason}], "usage": None}


def answer_with(page: Page, *answers: Sequence[dict[str, Any]]) -> None:
    """Answer the page's next requests with these deltas of one choice each; the last answer repeats."""
    left = list(answers)

    def fulfill(route: Route) -> None:
        deltas = left.pop(0) if len(left) > 1 else left[0]
        events = [*map(chunk, deltas), chunk({}, finish_reason="stop")]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfill)


def words(text: str) -> Iterator[dict[str, Any]]:
    """Yield the deltas of a text, a few characters each."""
    yield from ({"content": text[start : start + 3]} for start in range(0, len(text), 3))


def texts(page: Page) -> list[str]:
    return page.locator(".message .plain, .message .text").all_text_contents()


def test_reload_restores_conversation_and_its_settings_continue_it(page: Page) -> None:
    answer_with(page, list(words("Paris.")))
    ask(page, "the capital of France?")
    expect(page.locator("#status")).to_have_text("Answer complete.")
    page.reload()
    assert texts(page) == ["the capital of France?", "Paris.\n"]
    expect(page.locator("#conversation_list .title")).to_have_text("the capital of France?")
    expect(page.locator("#send")).to_be_enabled()
    assert sent_messages(page, "and Spain?") == ["the capital of France?", "Paris.", "and Spain?"]


def test_stop_keeps_question_and_partial_answer(page: Page, stack: Stack) -> None:
    ask(page, "the user", max_tokens="1900", temperature="1", seed="5")
    expect(page.locator(".message.assistant .text")).not_to_be_empty()
    page.locator("#stop").click()
    expect(page.locator(".message.assistant .muted")).to_have_text("Stopped.")
    part = page.locator(".message.assistant .text").text_content() or ""
    stack.pace(SLOW_STEP_SECONDS)
    question, answer, further = sent_messages(page, "the end")
    assert (question, further) == ("the user", "the end")
    assert answer.split() == part.split() != []


def test_reload_in_the_middle_keeps_what_arrived(page: Page, stack: Stack) -> None:
    stack.pace(SLOW_STEP_SECONDS)
    ask(page, "the user", max_tokens="1900", temperature="1", seed="5")
    expect(page.locator(".message.assistant .text")).not_to_be_empty()
    page.reload()
    assert texts(page)[0] == "the user"
    assert texts(page)[1].strip()


def test_edit_sends_the_new_text_and_drops_what_followed(page: Page) -> None:
    answer_with(page, list(words("one")), list(words("two")), list(words("three")))
    ask(page, "first")
    expect(page.locator("#status")).to_have_text("Answer complete.")
    assert sent_messages(page, "second") == ["first", "one", "second"]
    expect(page.locator(".message.assistant")).to_have_count(2)
    expect(page.locator("#status")).to_have_text("Answer complete.")
    page.locator(".message.user .edit").first.click()
    page.locator(".message.user textarea").fill("changed")
    page.locator(".message.user").first.get_by_role("button", name="Send").click()
    expect(page.locator(".message.assistant .text")).to_have_text("three")
    assert texts(page) == ["changed", "three\n"]


def test_regenerate_replaces_the_last_answer(page: Page) -> None:
    answer_with(page, list(words("one")), list(words("two")))
    ask(page, "first")
    page.locator(".regenerate").click()
    expect(page.locator(".message.assistant .text")).to_have_text("two")
    assert len(texts(page)) == 2


def test_markdown_is_drawn_and_html_of_the_model_is_inert(page: Page) -> None:
    text = (
        "# Title\n\nSome **bold** text with `code`.\n\n- one\n- two\n\n"
        "```python\nprint('hello')\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        '<img src=x onerror="window.hit = 1"> <script>window.hit = 2</script>\n\n'
        "![picture](https://example.org/secret.png) [link](javascript:window.hit=3)\n"
    )
    answer_with(page, list(words(text)))
    ask(page, "show me")
    answer = page.locator(".message.assistant .text")
    expect(page.locator("#status")).to_have_text("Answer complete.")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("li")).to_have_text(["one", "two"])
    expect(answer.locator("td")).to_have_text(["1", "2"])
    expect(answer.locator(".hljs-string")).to_have_text("'hello'")
    expect(answer).to_contain_text('<img src=x onerror="window.hit = 1">')
    assert answer.locator("img, script, iframe").count() == 0
    assert all(href is None or href.startswith("https:") for href in answer.locator("a").evaluate_all(HREFS))
    answer.get_by_role("button", name="Copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == "print('hello')\n"
    assert page.evaluate("window.hit") is None
    assert page.locator(".message.assistant .text").text_content() == drawn_at_once(page, text)


HREFS = "links => links.map(link => link.getAttribute('href'))"


def drawn_at_once(page: Page, text: str) -> str:
    """Return the text content of an answer that arrives as one piece."""
    page.unroute("**/v1/chat/completions")
    answer_with(page, [{"content": text}])
    page.locator(".regenerate").click()
    expect(page.locator("#status")).to_have_text("Answer complete.")
    return page.locator(".message.assistant .text").text_content() or ""


def test_reasoning_and_tool_calls_are_shown_and_results_are_sent(page: Page) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Pa'}}
    deltas: list[dict[str, Any]] = [
        {"reasoning": "I should "},
        {"reasoning": "look it up."},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": 'ris"}'}}]},
    ]
    answer_with(page, deltas, list(words("Sunny.")))
    page.locator("#settings summary").click()
    page.locator("#tools").fill(json.dumps([TOOL]))
    page.locator("#prompt").fill("the weather in Paris?")
    page.locator("#send").click()
    expect(page.locator(".thoughts summary")).to_contain_text("Thought")
    expect(page.locator(".thoughts .plain")).to_have_text("I should look it up.")
    expect(page.locator(".call span")).to_have_text("tool call weather")
    expect(page.locator(".call pre")).to_have_text('{\n  "city": "Paris"\n}')
    page.locator(".results input").fill("22 degrees")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Send results").click()
    body = json.loads(asked.value.post_data or "")
    assert body["tools"] == [TOOL]
    assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert body["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "22 degrees"}
    expect(page.locator(".message.assistant .text").last).to_have_text("Sunny.")


def test_broken_stream_keeps_its_part_and_offers_a_retry(page: Page) -> None:
    broken = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=broken, content_type="text/event-stream"))
    ask(page, "first")
    expect(page.locator(".message.error")).to_contain_text("connection was lost")
    page.unroute("**/v1/chat/completions")
    answer_with(page, list(words("whole")))
    page.locator(".message.error").get_by_role("button", name="Retry").click()
    expect(page.locator(".message.assistant .text")).to_have_text("whole")
    assert texts(page) == ["first", "whole\n"]


def test_four_choices_are_visible_at_once_and_another_can_continue(page: Page) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    ask(page, "the user", max_tokens="40", temperature="1", seed="7", n="4")
    expect(page.locator("#status")).to_have_text("Answer complete.")
    frame = page.locator("#messages").bounding_box()
    assert frame is not None
    for choice in page.locator("article.assistant").all():
        box = choice.bounding_box()
        assert (
            box is not None
            and frame["y"] <= box["y"] + 1
            and box["y"] + box["height"] <= frame["y"] + frame["height"] + 1
        )
    second = page.locator("article.assistant .text").nth(1).text_content() or ""
    page.locator("article.assistant").nth(1).get_by_role("button").click()
    page.locator("#n").fill("1")
    assert sent_messages(page, "the end")[1].split() == second.split()


def test_conversations_are_listed_opened_removed_and_exported(page: Page) -> None:
    answer_with(page, list(words("one")))
    ask(page, "first")
    expect(page.locator("#status")).to_have_text("Answer complete.")
    with page.expect_download() as saved:
        page.locator("#export").click()
    assert json.loads(saved.value.path().read_text())["messages"][0] == {"role": "user", "content": "first"}
    page.locator("#new").click()
    expect(page.locator(".message")).to_have_count(0)
    page.locator("#prompt").fill("second")
    page.locator("#send").click()
    expect(page.locator("#conversation_list .title")).to_have_text(["second", "first"])
    page.locator("#conversation_list .title").last.click()
    assert texts(page) == ["first", "one\n"]
    page.get_by_role("button", name="Remove first").click()
    expect(page.locator("#conversation_list .title")).to_have_text(["second"])
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#clear_all").click()
    expect(page.locator("#conversation_list li")).to_have_count(0)
    page.reload()
    expect(page.locator(".message")).to_have_count(0)


def test_oldest_conversations_give_way(page: Page) -> None:
    kept = page.evaluate(
        """async () => {
          const { Conversations } = await import("./ui/conversations.js");
          const all = new Conversations(localStorage);
          const keeps = [];
          for (let number = 0; number < 5; number += 1) {
            const one = { ...all.create(), id: `c${number}` };
            one.messages.push({ role: "user", content: `${number}`.repeat(1_500_000) });
            keeps.push(all.save(one));
            await new Promise((resolve) => setTimeout(resolve, 2)); // the next one is newer
          }
          const long = all.create();
          long.messages.push({ role: "user", content: "x".repeat(5_000_000) });
          return [keeps, all.save(long), new Conversations(localStorage).newestFirst.map((one) => one.id)];
        }"""
    )
    assert kept == [[True] * 5, False, ["c4", "c3"]]


def test_page_without_history_stores_no_conversation(page: Page) -> None:
    def without_history(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, body=response.text().replace('data-history="on"', 'data-history="off"'))

    page.route(page.url, without_history)
    page.reload()
    answer_with(page, list(words("one")))
    ask(page, "first")
    expect(page.locator("#conversation_list .title")).to_have_text("first")
    assert page.evaluate("Object.keys(localStorage)") == []


def test_finished_blocks_of_a_growing_answer_are_not_drawn_again(page: Page) -> None:
    """A page that redraws a long answer for each token does not respond. A busy machine would fail a timed test."""
    paragraph = "word " * 3000
    text = (
        f"{paragraph}\n\n" + "- item of a list\n" * 300 + "\n```python\n" + "x = f(1, 'two')  # three\n" * 400 + "```\n"
    )
    deltas = [{"content": text[start : start + 5]} for start in range(0, len(text), 5)]
    assert len(deltas) > 5000
    events = "".join(f"data: {json.dumps(chunk(delta))}\n\n" for delta in deltas) + "data: [DONE]\n\n"
    pieces = [events[start : start + 2000] for start in range(0, len(events), 2000)]
    page.evaluate(STREAM_SLOWLY, pieces)
    page.locator("#prompt").fill("a long one")
    page.locator("#send").click()
    expect(page.locator(".message.assistant li").first).to_be_visible(timeout=60_000)
    page.locator(".message.assistant .text > p").evaluate("block => { block.dataset.drawn = 'once'; }")
    expect(page.locator("#status")).to_have_text("Answer complete.", timeout=60_000)
    expect(page.locator(".hljs-comment")).to_have_count(400)
    expect(page.locator(".message.assistant .text > p")).to_have_attribute("data-drawn", "once")
    assert (page.locator(".message.assistant .text > p").text_content() or "").split() == paragraph.split()


# Replaces fetch() of chat completions by a stream that delivers a piece every 5 ms.
STREAM_SLOWLY = """(pieces) => {
  const real = window.fetch;
  window.fetch = (url, options) => {
    if (!String(url).endsWith("v1/chat/completions")) return real(url, options);
    const encoder = new TextEncoder();
    const body = new ReadableStream({
      async pull(controller) {
        await new Promise((resolve) => setTimeout(resolve, 5));
        const piece = pieces.shift();
        if (piece === undefined) controller.close();
        else controller.enqueue(encoder.encode(piece));
      },
    });
    return Promise.resolve(new Response(body));
  };
}"""


def test_fleet_tab_shows_queue_and_workers(page: Page, stack: Stack) -> None:
    ask(page, "the user", max_tokens="1900", temperature="1")
    stack.pace(SLOW_STEP_SECONDS)
    page.locator("#fleet-tab").click()
    row = page.locator("#workers tr")
    expect(row).to_have_count(1)
    expect(row.locator("td").nth(1)).to_have_text("ready")
    eventually(lambda: (row.locator("td").nth(2).text_content() or "").startswith("1/"))
    expect(page.locator("#ready_workers")).to_have_text("1/1")
    expect(page.locator("#queues")).to_contain_text("interactive")
    eventually(lambda: (page.locator("#tokens_per_second").text_content() or "").strip("–0"))
    page.locator("#fleet-tab").press("ArrowLeft")
    expect(page.locator("#map")).to_be_visible()
