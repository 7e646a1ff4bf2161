// Reads snapshots of the workers' KV caches while the page is visible, and draws them.
import { events } from "./chat_stream.js";
import { $ } from "./dom.js";
import { KVMap } from "./kv_map.js";
import { RequestTable } from "./kv_requests.js";
import { KVTimeline } from "./kv_timeline.js";

const RETRY_MS = 3000;
const SILENT_MS = 5000; // workers publish each second; a silent one has ended
const SWEEP_MS = 1000;
const SERVE_WORKER = /^(serve\..+\.\d+)-(\d+)\./; // of `pagestream serve`: the number of its place and of its life
const KEPT_EVENTS = 500;
const LISTED_EVENTS = 100;

const latest = new Map(); // worker -> its last snapshot
const history = new Map(); // worker -> its last events, newest first
let deviceMap = null;
let hostMap = null;
let timeline = null;
let requestTable = null;
let picked = ""; // id of the request whose block table is shown
let feed = null;
let model = ""; // model whose workers are shown; "": all models

export function watchBlocks() {
  deviceMap = new KVMap($("map"), $("tip"), "device", pick);
  hostMap = new KVMap($("host_map"), $("host_tip"), "host", pick);
  requestTable = new RequestTable($("requests"), pick);
  timeline = new KVTimeline($("timeline"));
  $("worker").addEventListener("change", draw);
  document.addEventListener("visibilitychange", follow);
  setInterval(() => forget(isSilent), SWEEP_MS);
  follow();
}

export function showModel(name) {
  model = name;
  latest.clear();
  history.clear();
  follow();
}

// Reads only while the page is visible, because workers create snapshots only for viewers.
function follow() {
  feed?.abort();
  feed = null;
  if (document.hidden) return;
  feed = new AbortController();
  read(feed);
}

async function read(controller) {
  try {
    const response = await fetch(`debug/kv/stream${model && `?model=${encodeURIComponent(model)}`}`, { signal: controller.signal });
    if (!response.ok) throw new Error(`HTTP ${response.status}`);
    for await (const data of events(response.body)) take(JSON.parse(data));
  } catch (error) {
    if (error.name === "AbortError") return;
  }
  if (!controller.signal.aborted) setTimeout(() => read(controller), RETRY_MS);
}

function take(snapshot) {
  latest.set(snapshot.worker, { ...snapshot, receivedAt: performance.now() });
  forget((name) => isEarlierLife(name, snapshot.worker));
  history.set(snapshot.worker, [...snapshot.events.toReversed(), ...(history.get(snapshot.worker) || [])].slice(0, KEPT_EVENTS));
  if (snapshot.worker === $("worker").value) draw();
}

function forget(isGone) {
  for (const [name, last] of latest) if (isGone(name, last)) { latest.delete(name); history.delete(name); }
  offerWorkers();
}

function isSilent(name, last) {
  // A hidden page reads nothing, so it knows of no silence.
  return !document.hidden && performance.now() - last.receivedAt > SILENT_MS;
}

// Whether `serve` started `worker` after the process of `name` had ended.
function isEarlierLife(name, worker) {
  const [, place, life] = SERVE_WORKER.exec(worker) ?? [];
  const [, itsPlace, itsLife] = SERVE_WORKER.exec(name) ?? [];
  return place !== undefined && place === itsPlace && Number(itsLife) < Number(life);
}

function offerWorkers() {
  const select = $("worker");
  const names = [...latest.keys()].sort();
  if (names.join() === [...select.options].map((option) => option.value).join()) return;
  const chosen = select.value;
  const options = names.length ? names.map((name) => new Option(name, name)) : [new Option("waiting for workers", "")];
  select.replaceChildren(...options);
  select.disabled = !names.length;
  select.value = names.find((name) => name === chosen) ?? names.find((name) => isEarlierLife(chosen, name)) ?? options[0].value;
  draw();
}

function pick(id) {
  picked = picked === id ? "" : id;
  draw();
}

function draw() {
  const snapshot = latest.get($("worker").value);
  if (!snapshot) return;
  const owner = snapshot.requests.find((request) => request.id === picked);
  deviceMap.draw(view(snapshot, snapshot.states, "blocks"), owner?.blocks ?? []);
  $("host").hidden = !snapshot.host_states;
  if (snapshot.host_states) hostMap.draw(view(snapshot, snapshot.host_states, "host_blocks"), owner?.host_blocks ?? []);
  const moves = history.get(snapshot.worker) || [];
  timeline.draw(moves, snapshot.time_seconds);
  $("usage").textContent = summary(snapshot);
  $("host_usage").textContent = hostSummary(snapshot);
  $("map").setAttribute("aria-label", `Map of the KV blocks: ${$("usage").textContent}. Arrow keys move from block to block`);
  requestTable.draw(snapshot.requests, picked);
  $("events").replaceChildren(...moves.slice(0, LISTED_EVENTS).map(eventLine));
}

function view({ worker, block_size: slots, requests }, states, table) {
  const tables = requests.flatMap((request) => {
    const groups = request.tables.length ? request.tables : [{ ...request, num_released_blocks: 0 }]; // earlier workers have none
    return groups.map((of, group) => ({
      id: request.id, group: groups.length > 1 ? ` in group ${group}` : "", blocks: of[table], first: of.num_released_blocks,
      computed: request.num_computed_tokens,
    }));
  });
  return { worker, states, slots, tables };
}

function countsOf(states) {
  const counts = { f: 0, c: 0, a: 0, s: 0 };
  for (const letter of states) if (letter in counts) counts[letter] += 1;
  return { ...counts, total: counts.f + counts.c + counts.a + counts.s };
}

function summary(snapshot) {
  const { f, c, a, s, total } = countsOf(snapshot.states);
  const parts = [`${a + s} active`, `${s} of them shared`, `${c} cached`, `${f} free`, `${total} in all`];
  const copied = snapshot.events.filter((event) => event.kind === "copy").reduce((sum, event) => sum + event.num_blocks, 0);
  if (copied) parts.push(`${copied} just copied`);
  return parts.join(" · ");
}

function hostSummary(snapshot) {
  const { f, c, a, s, total } = countsOf(snapshot.host_states);
  return `${a + s} swapped · ${c} cached · ${f} free · ${total} in all`;
}

function eventLine(event) {
  const element = document.createElement("li");
  const size = event.num_bytes ? `, ${(event.num_bytes / 2 ** 20).toFixed(1)} MiB` : "";
  const time = event.milliseconds == null ? "" : `, ${event.milliseconds.toFixed(1)} ms`;
  const whose = event.request_id ? ` of ${event.request_id.slice(0, 12)}` : "";
  element.textContent = `${event.kind.replace("_", " ")}${whose}: ${event.num_blocks} blocks${size}${time} (${event.reason})`;
  return element;
}
