// The list of conversations: open, remove, export, remove all.
import { $, button, element } from "./dom.js";

const NARROW = "(max-width: 1100px)";

export class Sidebar {
  // The handlers: open(conversation), removed(id).
  constructor(conversations, handlers) {
    this.conversations = conversations;
    this.handlers = handlers;
    this.openId = "";
    $("conversations").open = !matchMedia(NARROW).matches;
    $("export").addEventListener("click", () => download(this.conversations.byId.get(this.openId)));
    $("clear_all").addEventListener("click", () => {
      if (confirm("Remove all conversations from this browser?")) this.#clear();
    });
  }

  draw(openId) {
    this.openId = openId;
    const all = this.conversations.newestFirst;
    $("conversation_list").replaceChildren(...all.map((conversation) => this.#row(conversation)));
    $("export").disabled = !this.conversations.byId.has(openId);
    $("clear_all").disabled = !all.length;
  }

  #row(conversation) {
    const title = conversation.title || "empty";
    const open = button(title, () => this.handlers.open(conversation), { className: "title" });
    if (conversation.id === this.openId) open.setAttribute("aria-current", "true");
    const remove = button("×", () => {
      this.conversations.remove(conversation.id);
      this.handlers.removed(conversation.id);
    }, { className: "small", ariaLabel: `Remove ${title}` });
    return element("li", {}, open, remove);
  }

  #clear() {
    this.conversations.clear();
    this.handlers.removed(this.openId);
  }
}

function download(conversation) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" }));
  element("a", { href: url, download: `conversation-${conversation.id}.json` }).click();
  URL.revokeObjectURL(url);
}
