// Messages of a conversation as elements: what the user wrote, the choices of an answer, an error.
import { button, element } from "./dom.js";
import { MarkdownStream } from "./markdown.js";

// `onEdit` gets the new text.
export function userMessage(text, onEdit) {
  const content = element("span", { className: "plain" }, text);
  const actions = element("div", { className: "actions" });
  const root = element("div", { className: "message user" }, element("b", {}, "user"), content, actions);
  const edit = button("Edit", () => {
    const field = element("textarea", { value: text, rows: 3, ariaLabel: "New text of the message" });
    const restore = () => { field.replaceWith(content); actions.replaceChildren(edit); edit.focus(); };
    content.replaceWith(field);
    actions.replaceChildren(
      button("Send", () => { if (field.value.trim()) onEdit(field.value.trim()); }, { className: "small" }),
      button("Cancel", restore, { className: "small" }),
    );
    field.focus();
  }, { className: "small edit" });
  actions.append(edit);
  return root;
}

export function toolMessage(message) {
  return element("div", { className: "message tool" }, element("b", {}, "tool result"), element("span", { className: "plain" }, message.content));
}

export function errorMessage(text, onRetry) {
  return element("div", { className: "message error", role: "alert" }, element("b", {}, "error"),
    element("span", { className: "plain" }, text), element("div", { className: "actions" }, button("Retry", onRetry, { className: "small" })));
}

// An answer with its choices side by side. The handlers: use(number), regenerate(), results([{tool_call_id, content}]).
export class AnswerView {
  constructor(numChoices, handlers) {
    this.choices = Array.from({ length: numChoices }, (_, number) => new ChoiceView(number, numChoices));
    this.actions = element("div", { className: "actions" });
    this.root = element("div", { className: "answer" },
      element("div", { className: "choices" }, ...this.choices.map((choice) => choice.root)), this.actions);
    this.handlers = handlers;
  }

  // A finished answer, as stored.
  static of(message, handlers) {
    const view = new AnswerView(message.choices.length, handlers);
    message.choices.forEach((choice, number) => view.choices[number].fill(choice));
    view.finish(message.used);
    return view;
  }

  // The answer ended: draw what is left, and offer what can be done with it.
  finish(used) {
    this.choices.forEach((choice) => choice.finish());
    this.actions.replaceChildren(
      button("Copy", () => navigator.clipboard.writeText(this.choices[used].content), { className: "small" }),
      button("Regenerate", () => this.handlers.regenerate(), { className: "small regenerate" }),
    );
    if (this.choices.length > 1) this.#offerUse(used);
    const calls = this.choices[used].calls;
    if (calls.length) this.actions.append(resultsForm(calls, this.handlers.results));
  }

  get asMessage() {
    return { role: "assistant", used: 0, choices: this.choices.map((choice) => choice.asStored) };
  }

  #offerUse(used) {
    this.choices.forEach((choice, number) => {
      const use = button(number === used ? "Continued" : "Continue with this", () => this.handlers.use(number), { className: "small" });
      use.setAttribute("aria-pressed", String(number === used));
      choice.footer.replaceChildren(use);
    });
  }
}

// One choice: thoughts, text, tool calls, and a note if it did not end by itself.
class ChoiceView {
  constructor(number, numChoices) {
    const name = numChoices > 1 ? `assistant ${number + 1}` : "assistant";
    this.text = element("div", { className: "text" });
    this.callList = element("div");
    this.footer = element("div", { className: "actions" });
    this.note = element("p", { className: "muted" });
    this.root = element("article", { className: "message assistant", ariaLabel: name },
      element("b", {}, name), this.text, this.callList, this.note, this.footer);
    if (numChoices > 1) this.root.tabIndex = 0; // beside others it scrolls
    this.markdown = new MarkdownStream(this.text);
    this.thoughts = null;
    this.calls = [];
  }

  get content() { return this.markdown.text; }

  get asStored() {
    return {
      content: this.content, reasoning: this.thoughts?.text ?? "", note: this.note.textContent,
      tool_calls: this.calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } })),
    };
  }

  // A `delta` of a streamed chat completion.
  take(delta, finishReason) {
    const thought = delta.reasoning ?? delta.reasoning_content;
    if (thought) this.#think(thought);
    if (delta.content) {
      this.thoughts?.end();
      this.markdown.append(delta.content);
    }
    for (const call of delta.tool_calls ?? []) this.#call(call);
    if (finishReason === "length") this.say("Ended at the maximum number of tokens.");
  }

  fill(stored) {
    this.take({ content: stored.content, reasoning: stored.reasoning });
    stored.tool_calls.forEach((call, index) => this.#call({ ...call, index }));
    this.say(stored.note);
  }

  say(note) { this.note.textContent = note; }

  finish() {
    this.thoughts?.end();
    this.markdown.finish();
    for (const call of this.calls) call.body.textContent = indented(call.args);
  }

  #think(piece) {
    if (!this.thoughts) {
      this.thoughts = new Thoughts();
      this.text.before(this.thoughts.root);
    }
    this.thoughts.append(piece);
  }

  #call({ index, id, function: part }) {
    if (!this.calls[index]) {
      const body = element("pre", { tabIndex: 0 });
      const title = element("div", { className: "code-bar" }, element("span", {}, `tool call ${part.name}`));
      this.callList.append(element("div", { className: "code call" }, title, body));
      this.calls[index] = { id, name: part.name, args: "", body };
    }
    this.calls[index].args += part.arguments ?? "";
    this.calls[index].body.textContent = this.calls[index].args;
  }
}

class Thoughts {
  constructor() {
    this.began = performance.now();
    this.words = document.createTextNode("");
    this.summary = element("summary", {}, "Thinking …");
    this.root = element("details", { className: "thoughts" }, this.summary, element("div", { className: "plain" }, this.words));
    this.isOver = false;
  }

  get text() { return this.words.data; }

  append(piece) { this.words.appendData(piece); }

  end() {
    if (this.isOver) return;
    this.isOver = true;
    const seconds = (performance.now() - this.began) / 1000;
    this.summary.textContent = seconds < 0.1 ? "Thoughts" : `Thought for ${seconds.toFixed(1)} s`;
  }
}

function resultsForm(calls, onResults) {
  const fields = calls.map((call) => element("input", { required: true, placeholder: "result", ariaLabel: `Result of ${call.name}` }));
  const form = element("form", { className: "row results" }, ...fields, element("button", { className: "small" }, "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    onResults(calls.map((call, index) => ({ role: "tool", tool_call_id: call.id, content: fields[index].value })));
  });
  return form;
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // cut off, or not JSON
  }
}
