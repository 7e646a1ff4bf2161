// The page: a playground over the public API, and the KV map (kv_map.js). No build step, no dependency, no storage.
import { streamChat } from "./chat_stream.js";
import { showModel, watchBlocks } from "./kv_feed.js";

const $ = (id) => document.getElementById(id);
const history = [];
let running = null;

function settings() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const stop = $("stop_strings").value.split("|").filter(Boolean);
  return {
    max_tokens: number("max_tokens"), temperature: number("temperature"), top_p: number("top_p"), n: number("n"),
    seed: number("seed"), stop: stop.length ? stop : undefined,
  };
}

function body() {
  const system = $("system").value;
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...history];
  return { model: $("model_choice").value, messages, ...settings(), stream: true, stream_options: { include_usage: true } };
}

function show(role, text = "") {
  const element = document.createElement("div");
  element.className = `message ${role}`;
  const name = document.createElement("b");
  name.textContent = role;
  const content = document.createElement("span");
  content.textContent = text;
  element.append(name, content);
  $("messages").append(element);
  element.scrollIntoView({ block: "nearest" });
  return content;
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || $("send").disabled) return;
  history.push({ role: "user", content: text });
  show("user", text);
  $("prompt").value = "";
  const request = body();
  const answers = Array.from({ length: request.n || 1 }, (_, i) => show(request.n > 1 ? `assistant ${i + 1}` : "assistant"));
  running = new AbortController();
  busy(true);
  const started = performance.now();
  let first = 0;
  let usage = null;
  try {
    for await (const chunk of streamChat(request, running.signal)) {
      for (const choice of chunk.choices) {
        const piece = choice.delta.content || "";
        if (piece && !first) first = performance.now();
        answers[choice.index].textContent += piece;
      }
      usage = chunk.usage || usage;
      figures(started, first, usage);
    }
    history.push({ role: "assistant", content: answers[0].textContent });
    $("status").textContent = "Answer complete.";
  } catch (error) {
    // A message without an answer is not sent again.
    history.pop();
    if (error.name === "AbortError") $("status").textContent = "Stopped.";
    else show("error", error.message);
  } finally {
    running = null;
    busy(false);
  }
}

function figures(started, first, usage) {
  if (first) $("ttft").textContent = `${(first - started).toFixed(0)} ms`;
  if (!usage) return;
  const seconds = (performance.now() - first) / 1000;
  $("prompt_tokens").textContent = usage.prompt_tokens;
  $("cached_tokens").textContent = usage.prompt_tokens_details?.cached_tokens ?? 0;
  $("output_tokens").textContent = usage.completion_tokens;
  $("speed").textContent = seconds > 0 ? `${((usage.completion_tokens - 1) / seconds).toFixed(1)} tok/s` : "–";
}

function busy(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  if (is) $("status").textContent = "Generating …";
}

// The browser sends the API key itself, and the page cannot read it; so the command takes it from a variable.
async function curlCommand() {
  const quoted = JSON.stringify(body()).replaceAll("'", "'\\''");
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

async function look() {
  try {
    const ready = await (await fetch("ready")).json();
    $("state").textContent = ready.state === "ready" ? "ready" : `${ready.phase} ${Math.round(ready.progress * 100)} %`;
    $("state").classList.toggle("ready", ready.state === "ready");
    if (!$("model_choice").options.length) await offerModels();
  } catch {
    $("state").textContent = "unreachable";
    $("state").classList.remove("ready");
  }
  setTimeout(look, 2000);
}

async function offerModels() {
  const names = (await (await fetch("v1/models")).json()).data.map((model) => model.id);
  $("model_choice").replaceChildren(...names.map((name) => new Option(name, name)));
  $("model").textContent = names[0];
  // A request names its model, so nothing can be sent or copied before this.
  $("send").disabled = $("curl").disabled = !names.length;
  if (names.length > 1) showModel(names[0]);
}

$("model_choice").addEventListener("change", () => {
  $("model").textContent = $("model_choice").value;
  showModel($("model_choice").value);
});
$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => { history.length = 0; $("messages").replaceChildren(); });
$("curl").addEventListener("click", copyCurl);
look();
watchBlocks();
