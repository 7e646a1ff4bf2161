// The npm package `openai`, as a program: FOLDER-OF-NODE_MODULES URL MODEL -> what it saw, as JSON.
import { createRequire } from "node:module";

const [folder, url, model] = process.argv.slice(2);
const OpenAI = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const asked = { model, messages, temperature: 0, max_completion_tokens: 30 };

const answer = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2 });
let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
const completion = await client.completions.create({ model, prompt: "1 2 3 4", max_tokens: 4, temperature: 0 });
const models = [];
for await (const entry of client.models.list()) models.push(entry.id);

const request = { model, input: "What is the capital of France?", temperature: 0, max_output_tokens: 30 };
const response = await client.responses.create(request);
const kinds = [];
let final = null;
for await (const event of await client.responses.create({ ...request, stream: true })) {
  if (kinds.at(-1) !== event.type) kinds.push(event.type);
  final = event.response ?? final;
}
const read = await client.responses.retrieve(response.id);
const follow = { ...request, input: "And of Italy?", previous_response_id: response.id, max_output_tokens: 3 };
const next = await client.responses.create(follow);
await client.responses.delete(response.id);
const gone = await client.responses.retrieve(response.id).catch((raised) => raised.status);

const error = await client.chat.completions.create({ ...asked, temperature: 3 }).catch((raised) => raised);

console.log(JSON.stringify({
  text: answer.choices[0].message.content,
  scored: answer.choices[0].logprobs.content.map((entry) => entry.token).join(""),
  streamed,
  usage: [answer.usage, usage].map((count) => [count.prompt_tokens, count.completion_tokens]),
  completion: completion.choices[0].text,
  models,
  error: [error.constructor.name, error.status, error.code, error.param],
  responses: {
    texts: [response.output_text, read.output_text, final.output[0].content[0].text],
    status: [response.status, read.status, final.status],
    usage: [response.usage.input_tokens, response.usage.output_tokens],
    kinds,
    follows: next.previous_response_id === response.id && next.usage.input_tokens > response.usage.input_tokens,
    gone,
  },
  requestId: Boolean(answer._request_id),
}));
