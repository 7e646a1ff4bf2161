// The conversations of this browser, newest first. They survive a reload, unless the server has --no-ui-history.
//
// A conversation is {id, title, updated, messages}. A message is {role: "user" | "tool", content, tool_call_id?} or
// {role: "assistant", choices: [{content, reasoning, tool_calls, note}], used}: `used` is the choice that later messages continue.

const PREFIX = "pagestream.conversation.";
const MAX_CHARACTERS = 4_000_000; // browsers store about five million for one address
const TITLE_CHARACTERS = 40;

export class Conversations {
  constructor(storage) {
    this.storage = storage; // null: conversations end with the page
    this.byId = new Map();
    for (const key of storedKeys(storage)) {
      const conversation = JSON.parse(storage.getItem(key));
      this.byId.set(conversation.id, conversation);
    }
  }

  get newestFirst() {
    return [...this.byId.values()].sort((a, b) => b.updated - a.updated);
  }

  create() {
    return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "", updated: Date.now(), messages: [] };
  }

  // Returns whether it is kept after a reload.
  save(conversation) {
    const first = conversation.messages.find((message) => message.role === "user");
    conversation.title = first?.content.slice(0, TITLE_CHARACTERS) ?? "";
    conversation.updated = Date.now();
    this.byId.set(conversation.id, conversation);
    return this.#store(conversation);
  }

  remove(id) {
    this.byId.delete(id);
    this.storage?.removeItem(PREFIX + id);
  }

  clear() {
    for (const id of [...this.byId.keys()]) this.remove(id);
  }

  #store(conversation) {
    if (!this.storage) return false;
    const text = JSON.stringify(conversation);
    if (text.length > MAX_CHARACTERS) return false;
    const key = PREFIX + conversation.id;
    const sizes = new Map(storedKeys(this.storage).map((stored) => [stored, this.storage.getItem(stored).length]));
    sizes.set(key, text.length);
    let total = [...sizes.values()].reduce((sum, size) => sum + size, 0);
    for (const oldest of this.newestFirst.toReversed()) {
      if (total <= MAX_CHARACTERS) break;
      total -= sizes.get(PREFIX + oldest.id) ?? 0;
      this.remove(oldest.id);
    }
    try {
      this.storage.setItem(key, text);
    } catch {
      return false; // the browser allows less, or other pages of this address use it
    }
    return true;
  }
}

// localStorage, or null if the server or the browser does not allow it.
export function allowedStorage() {
  if (document.documentElement.dataset.history !== "on") return null;
  try {
    return localStorage;
  } catch {
    return null;
  }
}

function storedKeys(storage) {
  return storage ? Object.keys(storage).filter((key) => key.startsWith(PREFIX)) : [];
}
