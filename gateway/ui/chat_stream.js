// POST /v1/chat/completions as a stream of parsed chunks.

export async function* streamChat(body, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error((await errorOf(response)) || `HTTP ${response.status}`);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
  throw new Error("The connection was lost before the end of the stream.");
}

export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const whole = (pending + value).split("\n\n");
    pending = whole.pop();
    for (const event of whole) {
      const lines = event.split("\n").filter((line) => line.startsWith("data: "));
      if (lines.length) yield lines.map((line) => line.slice(6)).join("\n");
    }
  }
}

async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "";
  }
}
