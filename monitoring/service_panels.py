"""Panels of what clients see: rates, errors, latencies, lengths."""

from monitoring.panels import Panel, heatmap, lines, mean, quantiles, rate, stack, stat, total_rate
from monitoring.queries import MODEL, PROCESS, SELECTED, in_queue


def service_panels() -> list[Panel]:
    http = "pagestream_http_request_duration_seconds"
    failures = f'(sum(rate({http}_count{{{PROCESS},code=~"5.."}}[$__rate_interval])) or vector(0))'
    generated = "pagestream_generation_tokens_total"
    inference = f'{PROCESS},route=~"/v1/(.*completions|messages|responses|embeddings)"'
    return [
        stat("Requests", "Answered a second", "reqps", f"sum(rate({http}_count{{{inference}}}[$__rate_interval]))"),
        stat(
            "Errors",
            "Answers with a status of 500 or more / all answers",
            "percentunit",
            f"{failures} / {total_rate(f'{http}_count', PROCESS)}",
        ),
        stat("Open", "Inference requests being answered", "short", f"sum(pagestream_gateway_streams{{{PROCESS}}})"),
        stat("Output", "Tokens generated a second", "short", total_rate(generated, SELECTED)),
        stat("Ready workers", "Whose heartbeats say ready", "short", in_queue("pagestream_gateway_ready_workers")),
        stat("Store", "1 if all gateways reach it", "short", f"min(pagestream_redis_up{{{PROCESS}}})"),
        lines(
            "Time to first token",
            "From a request's arrival at the gateway",
            "s",
            quantiles("pagestream_time_to_first_token_seconds", MODEL),
        ),
        lines(
            "Inter-token latency",
            "As clients see it",
            "s",
            quantiles("pagestream_inter_token_latency_seconds", MODEL),
        ),
        lines(
            "Request duration",
            "From a request's arrival to its last token",
            "s",
            quantiles("pagestream_request_duration_seconds", MODEL),
        ),
        heatmap(
            "Time to first token, spread",
            "How many requests got their first token after how long",
            "s",
            "pagestream_time_to_first_token_seconds",
            MODEL,
        ),
        lines(
            "Tokens",
            "Generated, and prompt tokens computed or found in a cache",
            "short",
            {
                "output": total_rate(generated, SELECTED),
                "prompt": total_rate("pagestream_prompt_tokens_total", SELECTED),
            },
        ),
        lines(
            "Time per output token",
            "Mean of each choice after its first token",
            "s",
            quantiles("pagestream_time_per_output_token_seconds", MODEL),
        ),
        stack(
            "Answers by status",
            "HTTP requests a second",
            "reqps",
            {"{{route}} {{code}}": f"sum by (route, code) (rate({http}_count{{{PROCESS}}}[$__rate_interval]))"},
        ),
        stack(
            "Ends of choices",
            "By reason, as their clients saw it",
            "ops",
            {"{{reason}}": rate("pagestream_gateway_choices_finished_total", "reason", MODEL)},
        ),
        lines(
            "Lengths",
            "Mean tokens of a prompt and of a choice",
            "short",
            {
                "prompt": mean("pagestream_request_prompt_tokens", MODEL),
                "output": mean("pagestream_request_generation_tokens", MODEL),
            },
        ),
        lines(
            "Clients that left",
            "Gone before their answer's end, or dropped because they read nothing",
            "ops",
            {
                "gone": total_rate("pagestream_gateway_client_disconnects_total", PROCESS),
                "stalled": total_rate("pagestream_gateway_write_stalls_total", PROCESS),
            },
        ),
        stack(
            "Lines of batches",
            "That got their result, by what it is",
            "ops",
            {"{{result}}": rate("pagestream_gateway_batch_lines_total", "result", PROCESS)},
        ),
    ]
