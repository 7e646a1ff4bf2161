"""Panels of what clients see: rates, errors, latencies, lengths."""

from monitoring.panels import Panel, heatmap, lines, mean, quantiles, rate, stack, stat, total_rate
from monitoring.queries import MODEL, PROCESS, SELECTED, in_queue


def service_panels() -> list[Panel]:
    http = "pagestream_http_request_duration_seconds"
    generated = "pagestream_generation_tokens_total"
    inference = f'{PROCESS},route=~"/v1/(.*completions|messages|responses|embeddings)"'
    ended = "pagestream_gateway_choices_finished_total"
    refused = f'(sum(rate({http}_count{{{inference},code=~"5.."}}[$__rate_interval])) or vector(0))'
    failed = f'(sum(rate({ended}{{{MODEL},reason="error"}}[$__rate_interval])) or vector(0))'
    return [
        stat(
            "Requests",
            "Inference responses per second",
            "reqps",
            f"sum(rate({http}_count{{{inference}}}[$__rate_interval]))",
        ),
        stat(
            "Errors",
            "Inference responses with status 500 or more, and choices that ended with an error / inference responses",
            "percentunit",
            f"({refused} + {failed}) / {total_rate(f'{http}_count', inference)}",
        ),
        stat("Open", "Inference requests in progress", "short", f"sum(pagestream_gateway_streams{{{PROCESS}}})"),
        stat("Output", "Generated tokens per second", "short", total_rate(generated, SELECTED)),
        stat(
            "Ready workers",
            "Workers whose heartbeat reports ready",
            "short",
            in_queue("pagestream_gateway_ready_workers"),
        ),
        stat("Store", "1 if all gateways reach the store", "short", f"min(pagestream_redis_up{{{PROCESS}}})"),
        lines(
            "Time to first token",
            "From the arrival at the gateway to the first token",
            "s",
            quantiles("pagestream_time_to_first_token_seconds", MODEL),
        ),
        lines(
            "Inter-token latency",
            "Time between tokens at the gateway",
            "s",
            quantiles("pagestream_inter_token_latency_seconds", MODEL),
        ),
        lines(
            "Request duration",
            "From the arrival at the gateway to the last token",
            "s",
            quantiles("pagestream_request_duration_seconds", MODEL),
        ),
        heatmap(
            "Time to first token, distribution",
            "Requests by time to first token",
            "s",
            "pagestream_time_to_first_token_seconds",
            MODEL,
        ),
        lines(
            "Tokens",
            "Generated tokens, and prompt tokens computed or found in a cache",
            "short",
            {
                "output": total_rate(generated, SELECTED),
                "prompt": total_rate("pagestream_prompt_tokens_total", SELECTED),
            },
        ),
        lines(
            "Time per output token",
            "Mean per choice, after its first token",
            "s",
            quantiles("pagestream_time_per_output_token_seconds", MODEL),
        ),
        stack(
            "Responses by status",
            "HTTP requests per second",
            "reqps",
            {"{{route}} {{code}}": f"sum by (route, code) (rate({http}_count{{{PROCESS}}}[$__rate_interval]))"},
        ),
        stack(
            "Finished choices",
            "Choices by finish reason, as sent to clients",
            "ops",
            {"{{reason}}": rate("pagestream_gateway_choices_finished_total", "reason", MODEL)},
        ),
        lines(
            "Lengths",
            "Mean tokens per prompt and per choice",
            "short",
            {
                "prompt": mean("pagestream_request_prompt_tokens", MODEL),
                "output": mean("pagestream_request_generation_tokens", MODEL),
            },
        ),
        lines(
            "Disconnected clients",
            "Clients gone before the end of the response, or disconnected because they read nothing",
            "ops",
            {
                "gone": total_rate("pagestream_gateway_client_disconnects_total", PROCESS),
                "stalled": total_rate("pagestream_gateway_write_stalls_total", PROCESS),
            },
        ),
        stack(
            "Batch lines",
            "Finished batch lines, by result",
            "ops",
            {"{{result}}": rate("pagestream_gateway_batch_lines_total", "result", PROCESS)},
        ),
    ]
