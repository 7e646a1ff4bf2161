// The page: a playground over the public API, its conversations, the fleet, and the KV map. No build step.
import { Chat } from "./chat.js";
import { Conversations, allowedStorage } from "./conversations.js";
import { $ } from "./dom.js";
import { showFleetOf, watchFleet } from "./fleet_view.js";
import { showModel, watchBlocks } from "./kv_feed.js";
import { watchSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";

const RETRY_MS = 2000;
const conversations = new Conversations(allowedStorage());
const chat = new Chat(keep);
const sidebar = new Sidebar(conversations, {
  open,
  removed: (id) => (id === chat.conversation.id ? open(conversations.create()) : sidebar.draw(chat.conversation.id)),
});

function open(conversation) {
  chat.open(conversation);
  sidebar.draw(conversation.id);
}

function keep(conversation) {
  const isKept = conversations.save(conversation);
  if (!isKept && allowedStorage()) $("storage").textContent = "This conversation is too long to be kept after a reload.";
  sidebar.draw(chat.conversation.id);
}

function submit() {
  const text = $("prompt").value.trim();
  if (!text || $("send").disabled) return;
  $("prompt").value = "";
  chat.send(text);
}

// The browser sends the API key itself, and the page cannot read it; so the command takes it from a variable.
async function curlCommand() {
  const quoted = JSON.stringify(chat.request()).replaceAll("'", "'\\''");
  const url = new URL("v1/chat/completions", location.href);
  const isOpen = (await fetch("v1/models", { credentials: "omit" })).status !== 401;
  const key = isOpen ? "" : ' -H "Authorization: Bearer $PAGESTREAM_API_KEY"';
  return `curl -N ${url} -H 'Content-Type: application/json'${key} -d '${quoted}'`;
}

async function copyCurl() {
  // A promise, because Safari allows clipboard writes only during the click event.
  const text = curlCommand().then((command) => new Blob([command], { type: "text/plain" }));
  await navigator.clipboard.write([new ClipboardItem({ "text/plain": text })]);
  $("status").textContent = "Copied.";
}

// A request names its model, so nothing can be sent or copied before the models are known.
async function offerModels() {
  try {
    const names = (await (await fetch("v1/models")).json()).data.map((model) => model.id);
    $("model_choice").replaceChildren(...names.map((name) => new Option(name, name)));
    $("send").disabled = $("curl").disabled = !names.length;
    if (names.length > 1) showModel(names[0]);
    if (names.length) return;
  } catch { /* the gateway does not answer yet */ }
  setTimeout(offerModels, RETRY_MS);
}

function watchTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const select = (chosen) => {
    for (const tab of tabs) {
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      $(tab.getAttribute("aria-controls")).hidden = tab !== chosen;
    }
  };
  for (const tab of tabs) {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = tabs[(tabs.indexOf(tab) + 1) % tabs.length];
      select(other);
      other.focus();
    });
  }
}

$("model_choice").addEventListener("change", () => {
  showModel($("model_choice").value);
  showFleetOf($("model_choice").value);
});
$("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!$("send").disabled) $("form").requestSubmit();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") chat.stop(); });
addEventListener("pagehide", () => chat.keepPart?.());
$("stop").addEventListener("click", () => chat.stop());
$("new").addEventListener("click", () => { open(conversations.create()); $("prompt").focus(); });
$("curl").addEventListener("click", copyCurl);
watchSettings();
watchTabs();
open(conversations.newestFirst[0] ?? conversations.create());
offerModels();
watchFleet();
watchBlocks();
