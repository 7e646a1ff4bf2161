"""The playground streams answers, Stop frees the blocks, and everything works with the keyboard alone."""

import json
import re
import shlex
import subprocess
from urllib.parse import quote

from playwright.sync_api import Page, expect

from tests.browser.conftest import ALIAS, MODEL, SLOW_STEP_SECONDS, Stack, eventually

TABS_TO_PROMPT = 6  # model, theme, new chat, list of conversations, conversation, message


def ask(page: Page, text: str, **settings: str) -> None:
    page.locator("#settings summary").click()
    for name, value in settings.items():
        page.locator(f"#{name}").fill(value)
    page.locator("#prompt").fill(text)
    page.locator("#send").click()


def sent_messages(page: Page, text: str) -> list[str]:
    """Send a message, and return the texts of all messages in its request."""
    page.locator("#prompt").fill(text)
    with page.expect_request("**/v1/chat/completions") as asked:
        page.locator("#send").click()
    return [message["content"] for message in json.loads(asked.value.post_data or "")["messages"]]


def test_answer_is_streamed_with_its_statistics(page: Page) -> None:
    ask(page, "the capital of France", max_tokens="60", temperature="1", seed="3")
    answer = page.locator(".message.assistant .text")
    expect(answer).not_to_be_empty()
    expect(page.locator("#stop")).to_be_enabled()
    begun = (answer.text_content() or "").rstrip()
    expect(page.locator("#status")).to_have_text("Answer complete.")
    whole = answer.text_content() or ""
    assert whole.startswith(begun) and len(whole) > len(begun)
    expect(page.locator("#ttft")).to_have_text(re.compile(r"^\d+ ms$"))
    expect(page.locator("#speed")).to_have_text(re.compile(r"^\d+\.\d tok/s$"))
    expect(page.locator("#output_tokens")).to_have_text("60")
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#model_choice")).to_have_value(MODEL)


def test_stop_button_ends_request_and_frees_blocks(page: Page, stack: Stack) -> None:
    ask(page, "the user", max_tokens="1900", temperature="1", seed="5", n="3")
    # Waiting sequences are listed too; they get blocks in their first step.
    eventually(lambda: len((kv := stack.kv())["sequences"]) == 3 and kv["device"]["num_active_blocks"] > 0)
    page.locator("#stop").click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    eventually(lambda: stack.kv()["device"]["num_active_blocks"] == 0 and not stack.kv()["sequences"], 5)
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#stop")).to_be_disabled()


def test_playground_works_with_keyboard_only(page: Page, stack: Stack) -> None:
    expect(page.locator("#send")).to_be_enabled()
    for _ in range(TABS_TO_PROMPT):
        page.keyboard.press("Tab")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("the end")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("of the user")
    assert page.locator("#prompt").input_value() == "the end\nof the user"
    stack.pace(SLOW_STEP_SECONDS)
    expect(page.locator("#send")).to_be_enabled()
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped.")


def test_nothing_is_sent_before_the_models_are_known(page: Page) -> None:
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": []}))
    with page.expect_request("**/v1/models"):
        page.reload()
    page.locator("#settings summary").click()
    page.locator("#max_tokens").fill("3")
    page.locator("#prompt").fill("the end")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#send")).to_be_disabled()
    expect(page.locator("#curl")).to_be_disabled()
    expect(page.locator("#prompt")).to_have_value("the end")
    page.unroute("**/v1/models")
    # The page asks for the models again every two seconds.
    page.locator("#send").click()
    expect(page.locator(".message.assistant .text")).not_to_be_empty()
    expect(page.locator("#status")).to_have_text("Answer complete.")


def test_refused_message_returns_to_the_prompt(page: Page) -> None:
    long_text = "the " * 3000
    ask(page, long_text, max_tokens="3")
    expect(page.locator(".message.error span")).to_contain_text("2048")
    expect(page.locator("#prompt")).to_have_value(long_text.strip())
    expect(page.locator("#status")).to_be_empty()
    assert page.locator(".message.user").count() == 0
    page.locator("#prompt").fill("the end")
    page.locator("#send").click()
    expect(page.locator("#status")).to_have_text("Answer complete.")
    answer = (page.locator(".message.assistant .text").text_content() or "").strip()
    question, sent_answer, further = sent_messages(page, "the user")
    assert (question, sent_answer.strip(), further) == ("the end", answer, "the user")


def test_enter_checks_the_settings(page: Page) -> None:
    page.locator("#settings summary").click()
    page.locator("#max_tokens").fill("3")
    page.locator("#temperature").fill("3")
    page.locator("#prompt").fill("the end")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#temperature")).to_be_focused()
    expect(page.locator("#prompt")).to_have_value("the end")
    page.locator("#temperature").fill("0.35")
    page.locator("#tools").fill("{}")
    page.locator("#settings summary").click()
    page.locator("#prompt").press("Enter")
    expect(page.locator("#tools")).to_be_focused()
    page.locator("#tools").fill("")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#status")).to_have_text("Answer complete.")


def test_selected_model_answers_and_its_blocks_are_shown(page: Page) -> None:
    expect(page.locator("#model_choice option")).to_have_text([MODEL, ALIAS])
    with page.expect_request(f"**/debug/kv/stream?model={quote(ALIAS, safe='')}"):
        page.locator("#model_choice").select_option(ALIAS)
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "the end", max_tokens="3")
    assert json.loads(asked.value.post_data or "")["model"] == ALIAS
    expect(page.locator("#status")).to_have_text("Answer complete.")
    expect(page.locator("#usage")).to_contain_text("in all")


def test_copied_command_sends_the_same_request(page: Page) -> None:
    page.locator("#settings summary").click()
    page.locator("#system").fill("It's short")
    page.locator("#stop_strings").fill("a|b")
    page.locator("#max_tokens").fill("5")
    expect(page.locator("#model_choice")).to_have_value(MODEL)
    page.locator("#curl").click()
    expect(page.locator("#status")).to_have_text("Copied.")
    command = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    body = json.loads(command[-1])
    assert body["messages"] == [{"role": "system", "content": "It's short"}]
    assert (body["model"], body["stop"], body["max_tokens"]) == (MODEL, ["a", "b"], 5)
    body["messages"].append({"role": "user", "content": "the end"})
    done = subprocess.run([*command[:-1], json.dumps(body)], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_copied_command_reads_api_key_from_environment(page: Page) -> None:
    expect(page.locator("#model_choice")).to_have_value(MODEL)
    # the gateway's answer to a request without a key
    page.route("**/v1/models", lambda route: route.fulfill(status=401))
    page.locator("#curl").click()
    expect(page.locator("#status")).to_have_text("Copied.")
    command = page.evaluate("navigator.clipboard.readText()")
    assert ' -H "Authorization: Bearer $PAGESTREAM_API_KEY" ' in command
