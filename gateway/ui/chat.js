// One conversation on the screen: sends it, streams the answer, and keeps what arrived.
import { streamChat } from "./chat_stream.js";
import { $ } from "./dom.js";
import { AnswerView, errorMessage, toolMessage, userMessage } from "./messages.js";
import { readSettings } from "./settings.js";

const NEAR_END_PIXELS = 60;

export class Chat {
  // `onChange` is called with the conversation after each message that ended.
  constructor(onChange) {
    this.onChange = onChange;
    this.conversation = null;
    this.running = null; // AbortController of the answer that is generated
    this.keepPart = null; // keeps what has arrived of it
    this.handlers = {
      use: (number) => { this.#lastAnswer().used = number; this.#changed(); this.#drawAll(); },
      regenerate: () => this.#answer(this.#messagesBeforeLastAnswer()),
      results: (results) => this.#answer([...this.conversation.messages, ...results]),
    };
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.#drawAll();
    $("status").textContent = "";
  }

  send(text) {
    return this.#answer([...this.conversation.messages, { role: "user", content: text }], text);
  }

  stop() { this.running?.abort(); }

  // The body of a request for these messages.
  request(messages = this.conversation.messages) {
    const system = $("system").value;
    return {
      model: $("model_choice").value,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...messages.map(forTheApi)],
      ...readSettings(),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  // Asks for an answer to `messages`. If it is refused, the conversation stays as it was, and `typed` returns to the prompt.
  async #answer(messages, typed = "") {
    if (this.running) return;
    const conversation = this.conversation;
    const before = conversation.messages;
    const request = this.request(messages);
    conversation.messages = messages;
    this.#drawAll();
    const view = new AnswerView(request.n || 1, this.handlers);
    this.#append(view.root);
    const figures = new Figures();
    this.running = new AbortController();
    this.keepPart = () => this.#keep(conversation, messages, view);
    this.#busy(true);
    const outcome = await this.#stream(request, view, figures);
    this.running = this.keepPart = null;
    this.#busy(false);
    if (figures.firstAt || !outcome.error) {
      if (outcome.note) for (const choice of view.choices) choice.say(outcome.note);
      view.finish(0);
      if (isAtEnd($("messages"))) scrollToEnd($("messages"));
      this.#keep(conversation, messages, view);
      if (outcome.error && this.conversation === conversation) this.#append(errorMessage(outcome.error, this.handlers.regenerate));
    } else {
      conversation.messages = before;
      if (this.conversation === conversation) this.#refused(outcome, typed, () => this.#answer(messages, typed));
    }
    $("status").textContent = outcome.status;
  }

  async #stream(request, view, figures) {
    try {
      for await (const chunk of streamChat(request, this.running.signal)) {
        const followed = [$("messages"), ...view.choices.map((choice) => choice.root)].filter(isAtEnd);
        for (const choice of chunk.choices) {
          figures.sawToken(choice.delta);
          view.choices[choice.index].take(choice.delta, choice.finish_reason);
        }
        figures.show(chunk.usage);
        followed.forEach(scrollToEnd);
      }
      return { status: "Answer complete.", note: "", error: "" };
    } catch (error) {
      if (error.name === "AbortError") return { status: "Stopped.", note: "Stopped.", error: "" };
      return { status: "", note: error.message, error: error.message };
    }
  }

  #keep(conversation, messages, view) {
    conversation.messages = [...messages, view.asMessage];
    this.onChange(conversation);
  }

  #refused(outcome, typed, retry) {
    this.#drawAll();
    if (!$("prompt").value) $("prompt").value = typed;
    const error = errorMessage(outcome.error, () => {
      if ($("prompt").value === typed) $("prompt").value = "";
      retry();
    });
    this.#append(error);
  }

  #edit(index, text) {
    return this.#answer([...this.conversation.messages.slice(0, index), { role: "user", content: text }], text);
  }

  #lastAnswer() { return this.conversation.messages.at(-1); }

  #messagesBeforeLastAnswer() { return this.conversation.messages.slice(0, -1); }

  #changed() { this.onChange(this.conversation); }

  #drawAll() {
    const { messages } = this.conversation;
    $("messages").replaceChildren(...messages.map((message, index) => this.#view(message, index)));
    // Only the last answer can be continued by another choice, or generated again.
    for (const view of [...$("messages").querySelectorAll(".answer")].slice(0, -1)) {
      for (const one of view.querySelectorAll(".regenerate, .results, [aria-pressed]")) one.remove();
    }
    scrollToEnd($("messages"));
  }

  #view(message, index) {
    if (message.role === "assistant") return AnswerView.of(message, this.handlers).root;
    if (message.role === "tool") return toolMessage(message);
    return userMessage(message.content, (text) => this.#edit(index, text));
  }

  #append(root) {
    $("messages").append(root);
    scrollToEnd($("messages"));
  }

  #busy(is) {
    $("send").disabled = is;
    $("stop").disabled = !is;
    if (is) $("status").textContent = "Generating …";
  }
}

function isAtEnd({ scrollHeight, scrollTop, clientHeight }) {
  return scrollHeight - scrollTop - clientHeight < NEAR_END_PIXELS;
}

function scrollToEnd(frame) { frame.scrollTop = frame.scrollHeight; }

function forTheApi(message, index, messages) {
  if (message.role !== "assistant") return message;
  const { content, tool_calls: calls } = message.choices[message.used];
  // Calls without a result are left out: servers refuse them.
  const isAnswered = calls.length && messages[index + 1]?.role === "tool";
  return { role: "assistant", content, ...(isAnswered ? { tool_calls: calls } : {}) };
}

class Figures {
  constructor() {
    this.startedAt = performance.now();
    this.firstAt = 0;
  }

  sawToken(delta) {
    if (this.firstAt || !(delta.content || delta.reasoning || delta.reasoning_content || delta.tool_calls)) return;
    this.firstAt = performance.now();
    $("ttft").textContent = `${(this.firstAt - this.startedAt).toFixed(0)} ms`;
  }

  show(usage) {
    if (!usage) return;
    const seconds = (performance.now() - this.firstAt) / 1000;
    $("prompt_tokens").textContent = usage.prompt_tokens;
    $("cached_tokens").textContent = usage.prompt_tokens_details?.cached_tokens ?? 0;
    $("output_tokens").textContent = usage.completion_tokens;
    $("speed").textContent = seconds > 0 ? `${((usage.completion_tokens - 1) / seconds).toFixed(1)} tok/s` : "–";
  }
}
