"""AIPerf: profile streamed chats with synthetic prompts, and check the metrics that it reads from the server."""

import json

from tests.peers.peer import Environment, PeerFailed, Report, Served, expect, lines_from

PACKAGE = "aiperf"
NUM_REQUESTS, NUM_TOKENS = 8, 16


def run(served: Served, environment: Environment) -> Report:
    arguments = ["-m", served.name, "--url", served.url, "--endpoint-type", "chat", "--streaming"]
    arguments += ["--tokenizer", str(served.model), "--concurrency", "2", "--request-count", str(NUM_REQUESTS)]
    arguments += ["--isl", "32", "--osl", str(NUM_TOKENS), "--extra-inputs", "ignore_eos:true"]
    arguments += ["--use-server-token-count", "--artifact-dir", "out", "--ui", "none"]
    # With HF_HUB_OFFLINE it also refuses a tokenizer's folder; with a folder it sends the hub no request.
    output = environment.run("aiperf", "profile", *arguments, variables={})
    result = json.loads((environment.folder / "out" / "profile_export_aiperf.json").read_text())
    expect("requests", result["request_count"]["avg"], NUM_REQUESTS)
    expect("failed requests", result["request_error_rate"]["avg"], 0)
    expect("output tokens", result["total_usage_completion_tokens"]["avg"], NUM_REQUESTS * NUM_TOKENS)
    scraped = json.loads((environment.folder / "out" / "server_metrics_export.json").read_text())["metrics"]
    if not any(name.startswith("pagestream_") for name in scraped):
        raise PeerFailed(f"it read none of the server's metrics: {sorted(scraped)}")
    first, between = (result[name]["p50"] for name in ("time_to_first_token", "inter_token_latency"))
    summary = (
        f"{NUM_REQUESTS} streamed, 0 failed; {NUM_TOKENS} tokens each; TTFT p50 {first:.0f} ms, ITL {between:.0f} ms; "
        f"{len(scraped)} of the server's metrics read"
    )
    return Report(summary, lines_from(output, "AIPerf | LLM Metrics: Usage", "GPU Telemetry"))
