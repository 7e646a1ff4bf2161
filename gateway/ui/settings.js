// The settings form: the fields of a request besides its messages.
import { $ } from "./dom.js";

const NUMBERS = ["max_tokens", "temperature", "top_p", "n", "seed"];

export function readSettings() {
  const stop = $("stop_strings").value.split("|").filter(Boolean);
  const numbers = NUMBERS.map((id) => [id, $(id).value === "" ? undefined : Number($(id).value)]);
  return {
    ...Object.fromEntries(numbers),
    stop: stop.length ? stop : undefined,
    tools: $("tools").value.trim() ? JSON.parse($("tools").value) : undefined,
  };
}

export function watchSettings() {
  $("tools").addEventListener("input", () => $("tools").setCustomValidity(problemOfTools($("tools").value)));
  // A browser cannot point at an invalid field that is hidden.
  $("settings").addEventListener("invalid", () => { $("settings").open = true; }, { capture: true });
}

function problemOfTools(text) {
  if (!text.trim()) return "";
  try {
    return Array.isArray(JSON.parse(text)) ? "" : 'Tools: expected a JSON list, such as [{"type": "function", "function": {"name": "f"}}].';
  } catch (error) {
    return `Tools: not JSON: ${error.message}`;
  }
}
