// Markdown that grows while it is read. Blocks that cannot change any more stay in place; only the last is drawn again.
// HTML of a model is shown as text, and what marked makes of the rest is cleaned by DOMPurify.
import "./vendor/purify.min.js";
import hljs from "./vendor/highlight.min.js";
import { Marked } from "./vendor/marked.esm.js";
import { button, element } from "./dom.js";

const FRAME_MS = 33;
const IDLE_PER_BUSY = 5; // drawing takes at most a sixth of the time, however long the last block becomes
const MAX_HIGHLIGHTED = 50_000; // characters; 32 kB take 10 ms
const SANITIZE = { RETURN_DOM_FRAGMENT: true, FORBID_TAGS: ["img", "style", "form", "input"], FORBID_ATTR: ["style"] };
const FIRST_HEADING = 3; // below the headings of the page

const escape = (text) => text.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);
const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ raw }) => escape(raw),
    // Remote images would tell their host about the chat, and the page's policy blocks them: a link remains.
    image({ href, text }) { return `<a href="${escape(href)}">${escape(text || href)}</a>`; },
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + FIRST_HEADING - 1);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

export class MarkdownStream {
  constructor(container) {
    this.text = "";
    this.last = element("div", { className: "last" });
    container.append(this.last);
    this.settled = 0; // characters whose blocks stay as they are
    this.timer = 0;
    this.costMs = 0;
  }

  append(piece) {
    this.text += piece.replaceAll("\r\n", "\n");
    this.timer ||= setTimeout(() => this.#draw(false), Math.max(FRAME_MS, IDLE_PER_BUSY * this.costMs));
  }

  // Draws the rest at once; nothing follows.
  finish() {
    clearTimeout(this.timer);
    this.#draw(true);
  }

  #draw(isWhole) {
    this.timer = 0;
    const began = performance.now();
    const blocks = marked.lexer(this.text.slice(this.settled));
    const growing = isWhole ? blocks.length : blocks.findLastIndex((block) => block.type !== "space");
    const done = blocks.slice(0, Math.max(0, growing));
    if (done.length) {
      this.last.before(settledFragment(done));
      this.settled += done.reduce((sum, block) => sum + block.raw.length, 0);
    }
    this.last.replaceChildren(fragment(blocks.slice(done.length)));
    this.costMs = performance.now() - began;
  }
}

function fragment(blocks) {
  const clean = globalThis.DOMPurify.sanitize(marked.parser(blocks), SANITIZE);
  for (const link of clean.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const code of clean.querySelectorAll("pre")) code.tabIndex = 0; // scrolls sideways, so the keyboard must reach it
  return clean;
}

function settledFragment(blocks) {
  const clean = fragment(blocks);
  for (const code of clean.querySelectorAll("pre > code")) {
    const language = /language-(\S+)/.exec(code.className)?.[1];
    const known = language && hljs.getLanguage(language);
    if (known && code.textContent.length < MAX_HIGHLIGHTED) hljs.highlightElement(code);
    const copy = button("Copy", () => navigator.clipboard.writeText(code.textContent), { className: "small" });
    const frame = element("div", { className: "code" });
    code.parentElement.replaceWith(frame);
    frame.append(element("div", { className: "code-bar" }, element("span", {}, language ?? "text"), copy), code.parentElement);
  }
  return clean;
}
