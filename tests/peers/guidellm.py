"""GuideLLM: a short benchmark of the chat route with synthetic prompts. Its figures depend on this machine's load."""

import json

from tests.peers.peer import Environment, Report, Served, expect, lines_from

PACKAGE = "guidellm"
NUM_REQUESTS, NUM_TOKENS = 8, 16


def run(served: Served, environment: Environment) -> Report:
    arguments = ["--backend", f"kind=openai_http,target={served.url}", "--profile", "kind=concurrent,streams=2"]
    arguments += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    arguments += ["--tokenizer", f"kind=hf_auto,model={served.model}"]
    arguments += ["--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}"]
    arguments += ["--output", "kind=json,path=report.json", "--output", "kind=console", "--disable-console-interactive"]
    output = environment.run("guidellm", "run", *arguments)
    (benchmark,) = json.loads((environment.folder / "report.json").read_text())["benchmarks"]
    totals = {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    expect("requests", benchmark["metrics"]["request_totals"], totals)
    requests = benchmark["requests"]["successful"]
    expect("output tokens", [request["output_tokens"] for request in requests], [NUM_TOKENS] * NUM_REQUESTS)
    first = benchmark["metrics"]["time_to_first_token_ms"]["successful"]["median"]
    between = benchmark["metrics"]["inter_token_latency_ms"]["successful"]["median"]
    summary = (
        f"{NUM_REQUESTS} streamed, 0 failed; {NUM_TOKENS} tokens each; TTFT p50 {first:.0f} ms, ITL {between:.0f} ms"
    )
    return Report(summary, lines_from(output, "Request Token Statistics", "Run Summary Info"))
