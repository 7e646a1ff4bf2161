// Snapshots of the workers' KV memory while the page is visible, and what to draw of them.
import { events } from "./chat_stream.js";
import { KVMap } from "./kv_map.js";

const RETRY_MS = 3000;
const KEPT_EVENTS = 100;
const $ = (id) => document.getElementById(id);

const latest = new Map(); // worker -> its last snapshot
const history = new Map(); // worker -> its last events, newest first
let map = null;
let picked = ""; // request whose block table is shown
let feed = null;

export function watchBlocks() {
  map = new KVMap($("map"), $("tip"));
  $("worker").addEventListener("change", draw);
  document.addEventListener("visibilitychange", follow);
  follow();
}

// Only while somebody looks: the workers make no snapshots otherwise.
function follow() {
  feed?.abort();
  feed = null;
  if (document.hidden) return;
  feed = new AbortController();
  read(feed);
}

async function read(controller) {
  try {
    const response = await fetch("debug/kv/stream", { signal: controller.signal });
    if (!response.ok) throw new Error(`HTTP ${response.status}`);
    for await (const data of events(response.body)) take(JSON.parse(data));
  } catch (error) {
    if (error.name === "AbortError") return;
  }
  if (!controller.signal.aborted) setTimeout(() => read(controller), RETRY_MS);
}

function take(snapshot) {
  latest.set(snapshot.worker, snapshot);
  history.set(snapshot.worker, [...snapshot.events.toReversed(), ...(history.get(snapshot.worker) || [])].slice(0, KEPT_EVENTS));
  offerWorkers();
  if (snapshot.worker === $("worker").value) draw();
}

function offerWorkers() {
  const select = $("worker");
  const names = [...latest.keys()].sort();
  if (names.join() === [...select.options].map((option) => option.value).join()) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  select.disabled = false;
  if (latest.has(chosen)) select.value = chosen;
}

function draw() {
  const snapshot = latest.get($("worker").value);
  if (!snapshot) return;
  const copied = snapshot.events.filter((event) => event.kind === "copy").reduce((sum, event) => sum + event.num_blocks, 0);
  const owner = snapshot.requests.find((request) => request.id === picked);
  map.draw(snapshot, owner ? owner.blocks : []);
  $("usage").textContent = summary(snapshot, copied);
  $("requests").replaceChildren(...rows(snapshot));
  $("events").replaceChildren(...(history.get(snapshot.worker) || []).map(eventLine));
}

function summary(snapshot, copied) {
  const counts = { f: 0, c: 0, a: 0, s: 0 };
  for (const letter of snapshot.states) if (letter in counts) counts[letter] += 1;
  const total = counts.f + counts.c + counts.a + counts.s;
  const parts = [`${counts.a + counts.s} active`, `${counts.s} shared`, `${counts.c} cached`, `${counts.f} free`, `${total} in all`];
  if (snapshot.host_blocks) parts.push(`host: ${snapshot.host_used_blocks} of ${snapshot.host_blocks}`);
  if (copied) parts.push(`${copied} just copied`);
  return parts.join(" · ");
}

function rows(snapshot) {
  if (!snapshot.requests.length) return [row([cell("none", 4)])];
  return snapshot.requests.map((request) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = request.id;
    button.setAttribute("aria-pressed", String(request.id === picked));
    button.addEventListener("click", () => { picked = picked === request.id ? "" : request.id; draw(); });
    const first = document.createElement("td");
    first.append(button);
    return row([first, cell(request.state), cell(request.num_tokens), cell(request.blocks.length)]);
  });
}

function row(cells) {
  const element = document.createElement("tr");
  element.append(...cells);
  return element;
}

function cell(text, span = 1) {
  const element = document.createElement("td");
  element.colSpan = span;
  element.textContent = text;
  return element;
}

function eventLine(event) {
  const element = document.createElement("li");
  const size = event.num_bytes ? `, ${(event.num_bytes / 2 ** 20).toFixed(1)} MiB` : "";
  const time = event.milliseconds == null ? "" : `, ${event.milliseconds.toFixed(1)} ms`;
  const whose = event.request_id ? ` of ${event.request_id.slice(0, 12)}` : "";
  element.textContent = `${event.kind.replace("_", " ")}${whose}: ${event.num_blocks} blocks${size}${time} (${event.reason})`;
  return element;
}
