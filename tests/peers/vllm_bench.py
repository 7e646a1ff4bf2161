"""`vllm bench serve` for chat and completions, from vLLM's wheel without the packages of its GPU server."""

import json

from tests.peers.peer import OFFLINE, Environment, Report, Served, expect, figure, lines_from

PACKAGE = "vllm"
NUM_REQUESTS, NUM_TOKENS = 8, 16
ROUTES = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}  # backend name -> route


def run(served: Served, environment: Environment) -> Report:
    tables, summaries = [], []
    for backend, route in ROUTES.items():
        arguments = ["--backend", backend, "--base-url", served.url, "--endpoint", route, "--model", served.name]
        arguments += ["--tokenizer", str(served.model), "--dataset-name", "random", "--random-input-len", "32"]
        arguments += ["--random-output-len", str(NUM_TOKENS), "--ignore-eos", "--num-prompts", str(NUM_REQUESTS)]
        arguments += ["--max-concurrency", "2", "--save-result", "--result-filename", f"{backend}.json"]
        output = environment.run("vllm", "bench", "serve", *arguments, variables=OFFLINE | {"VLLM_NO_USAGE_STATS": "1"})
        result = json.loads((environment.folder / f"{backend}.json").read_text())
        expect("requests", (result["completed"], result["failed"]), (NUM_REQUESTS, 0))
        expect("output tokens", result["total_output_tokens"], NUM_REQUESTS * NUM_TOKENS)
        tables.append(f"{route}\n" + lines_from(output, "Serving Benchmark Result", "nanobind"))
        first, between = figure(output, "Median TTFT (ms)"), figure(output, "Median ITL (ms)")
        summaries.append(f"{route}: {NUM_REQUESTS} streamed, 0 failed, TTFT p50 {first} ms, ITL {between} ms")
    return Report("; ".join(summaries), "\n".join(tables))
