// The figures of the header and the tab of workers, read from /debug/fleet every two seconds.
import { $, element } from "./dom.js";

const POLL_MS = 2000;
let before = null; // generated tokens and time of the last reading
let model = ""; // the chosen model

export function showFleetOf(name) {
  model = name;
  before = null;
}

export async function watchFleet() {
  try {
    const { models } = await (await fetch("debug/fleet")).json();
    const fleet = models.find((one) => one.model === model) ?? models[0];
    if (fleet) show(fleet);
  } catch {
    $("state").textContent = "unreachable";
    $("state").classList.remove("ready");
    before = null;
  }
  setTimeout(watchFleet, POLL_MS);
}

function show(fleet) {
  // Until its last heartbeat is 10 s old, a worker that has registered is also there by the id of its start.
  const workers = fleet.workers.filter((one) => !fleet.workers.some((other) => other.id.startsWith(`${one.id}.`)));
  const ready = workers.filter((worker) => worker.phase === "ready");
  $("state").textContent = fleet.state === "ready" ? "ready" : `${fleet.phase} ${Math.round(fleet.progress * 100)} %`;
  $("state").classList.toggle("ready", fleet.state === "ready");
  $("ready_workers").textContent = `${ready.length}/${workers.length}`;
  $("queued").textContent = fleet.queue ? sum(Object.values(fleet.queue)) : "–";
  $("running").textContent = sum(workers.map((worker) => worker.running));
  $("tokens_per_second").textContent = rate(fleet.generated_tokens);
  $("queues").replaceChildren(...Object.entries(fleet.queue ?? {}).flatMap(([name, waiting]) => [
    element("div", {}, element("dt", {}, name), element("dd", {}, String(waiting)))]));
  $("workers").replaceChildren(...(workers.length ? workers.map(row) : [none()]));
}

// Tokens per second since the last reading; a worker that came or went makes one reading unusable.
function rate(tokens) {
  const now = performance.now();
  const last = before;
  before = { tokens, now };
  return last && tokens >= last.tokens ? ((1000 * (tokens - last.tokens)) / (now - last.now)).toFixed(0) : "–";
}

function row(worker) {
  const used = worker.kv_blocks_total ? worker.kv_blocks_used / worker.kv_blocks_total : 0;
  const meter = element("meter", { value: used, ariaLabel: `KV cache of ${worker.id} in use` });
  const cells = [worker.id, worker.phase, `${worker.running}/${worker.max_num_seqs || "–"}`, worker.waiting];
  return element("tr", {}, ...cells.map((text) => element("td", {}, String(text))),
    element("td", {}, meter, ` ${Math.round(100 * used)} %`));
}

function none() {
  return element("tr", {}, element("td", { colSpan: 5, className: "muted", textContent: "none" }));
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
