"""An answer of 8,000 tokens never blocks the page. Timed, so it needs an idle machine: run it by name, with -m long."""

import pytest
from playwright.sync_api import Page, expect

from tests.browser.test_playground import ask

pytestmark = pytest.mark.long
NUM_TOKENS, SECONDS = 8_000, 150.0
# Replaces the answer by Markdown at 200 tokens a second; a task of 50 ms or more is a long one (W3C Long Tasks API).
STREAMED_MARKDOWN = r"""numTokens => {
  window.longTasks = [];
  new PerformanceObserver(list => window.longTasks.push(...list.getEntries().map(task => task.duration)))
    .observe({type: 'longtask'});
  const realFetch = window.fetch, encoder = new TextEncoder();
  const words = 'the quick brown fox jumps over a lazy dog while **bold** words and `code` go on'.split(' ');
  const code = '\n\n```python\nfor number in range(10):\n    print(number)\n```\n\n';
  const item = number => number % 80 === 79 ? '.\n\n- item\n\n' : words[number % words.length] + ' ';
  const text = number => number % 400 === 399 ? code : item(number);
  const event = (delta, reason) => encoder.encode('data: ' + JSON.stringify({
    id: 'chatcmpl-1', object: 'chat.completion.chunk', model: 'tiny',
    choices: [{index: 0, delta, finish_reason: reason}],
  }) + '\n\n');
  const start = controller => {
    let number = 0;
    const timer = setInterval(() => {
      for (const end = Math.min(number + 2, numTokens); number < end; number++)
        controller.enqueue(event({content: text(number)}, null));
      if (number < numTokens) return;
      clearInterval(timer);
      controller.enqueue(event({}, 'stop'));
      controller.enqueue(encoder.encode('data: [DONE]\n\n'));
      controller.close();
    }, 10);
  };
  const headers = {'content-type': 'text/event-stream'};
  window.fetch = (url, options) => String(url.url || url).includes('/chat/completions')
    ? Promise.resolve(new Response(new ReadableStream({start}), {headers})) : realFetch(url, options);
}"""


def test_long_answer_causes_no_long_task(page: Page) -> None:
    page.evaluate(STREAMED_MARKDOWN, NUM_TOKENS)
    ask(page, "the user", max_tokens="1900")
    expect(page.locator("#status")).to_have_text("Answer complete.", timeout=SECONDS * 1000)
    assert page.evaluate("window.longTasks") == []
