"""python -m monitoring.build_dashboards: write grafana/dashboards/*.json.

    kv.json        where the KV blocks are, and what moved them
    service.json   what clients see: rates, errors, latencies
    engine.json    what a step is made of, the queue before it, and the memory under it

The JSON is committed, so that Grafana needs no build; a test holds it against this file.
"""

import json
from pathlib import Path

from monitoring.panels import (
    Panel,
    dashboard,
    heatmap,
    lines,
    mean,
    quantile,
    quantiles,
    rate,
    stack,
    stat,
    total_rate,
)  # fmt: skip

DASHBOARDS = Path(__file__).parent / "grafana" / "dashboards"
PROCESS = 'job=~"$job"'  # series that every program has, or only gateways
MODEL = f'{PROCESS},model=~"$model"'  # of a gateway, by model
ALL_QUEUES = f'{MODEL},stream="all"'
SELECTED = f'{MODEL},worker=~"$worker"'  # of a worker


def requests_in(state: str) -> str:
    return f'sum(pagestream_requests{{{SELECTED},state="{state}"}})'


def in_queue(metric: str, selected: str = MODEL) -> str:
    """Of all models. Every gateway tells the same of one: they look at the same store."""
    return f"sum(max by (model) ({metric}{{{selected}}}))"


def average(ratio: str) -> str:
    return f"avg({ratio}{{{SELECTED}}})"


def hit_rate() -> str:
    """Prompt tokens that were not computed, of all of them."""
    computed = f'sum(rate(pagestream_prompt_tokens_total{{{SELECTED},source="computed"}}[$__rate_interval]))'
    return f"1 - {computed} / {total_rate('pagestream_prompt_tokens_total', SELECTED)}"


def kv_panels() -> list[Panel]:
    return [
        stat("KV usage", "Active blocks / capacity", "percentunit", average("pagestream_kv_usage_ratio")),
        stat(
            "Internal waste",
            "Empty slots / slots in active blocks: the ends of the last blocks",
            "percentunit",
            average("pagestream_kv_internal_waste_ratio"),
        ),
        stat(
            "Sharing",
            "Blocks saved by sharing / blocks in all block tables",
            "percentunit",
            average("pagestream_kv_sharing_ratio"),
        ),
        stat("Prefix hits", "Prompt tokens found in the cache / all prompt tokens", "percentunit", hit_rate()),
        stat("Running", "Requests in the batch", "short", requests_in("running")),
        stat("Waiting", "Claimed by a worker, without blocks on the device", "short", requests_in("waiting")),
        stack(
            "KV blocks by state",
            "Active, cached and free add up to the capacity of each device",
            "short",
            {"{{device}} {{state}}": f"sum by (device, state) (pagestream_kv_blocks{{{SELECTED}}})"},
        ),
        lines(
            "Requests by state",
            "In the engines; waiting ones hold no blocks, swapped ones hold blocks of the host",
            "short",
            {"{{state}}": f"sum by (state) (pagestream_requests{{{SELECTED}}})"},
        ),
        lines(
            "Swap",
            "Bytes moved between device and host memory",
            "Bps",
            {"{{direction}}": rate("pagestream_kv_swap_bytes_total", "direction", SELECTED)},
        ),
        lines(
            "Swap time",
            "Of one step's transfers, which run beside the step",
            "s",
            {
                "mean {{direction}}": mean("pagestream_kv_swap_duration_seconds", SELECTED, "direction"),
                "p99 {{direction}}": quantile(0.99, "pagestream_kv_swap_duration_seconds", SELECTED, "direction"),
            },
        ),
        lines(
            "Preemptions",
            "Sequences that gave up their blocks, by the way they get them back",
            "ops",
            {"{{mode}}": rate("pagestream_preemptions_total", "mode", SELECTED)},
        ),
        stack(
            "KV blocks on the host",
            "Of swapped requests, and prefixes that the device evicted",
            "short",
            {"{{state}}": f"sum by (state) (pagestream_kv_host_blocks{{{SELECTED}}})"},
        ),
        stack(
            "Prompt tokens by source",
            "Computed, or found in a cache",
            "short",
            {"{{source}}": rate("pagestream_prompt_tokens_total", "source", SELECTED)},
        ),
        lines(
            "Copied and evicted blocks",
            "Copy-on-write of shared blocks, and cached blocks given up",
            "ops",
            {
                "copy on write": total_rate("pagestream_kv_copy_on_write_blocks_total", SELECTED),
                "evicted": total_rate("pagestream_kv_evicted_blocks_total", SELECTED),
            },
        ),
        heatmap(
            "Block lifetime in use",
            "How long blocks were held by requests, those that were given up in each interval",
            "s",
            "pagestream_kv_block_lifetime_seconds",
            f'{SELECTED},state="active"',
        ),
        heatmap(
            "Block lifetime in the cache",
            "How long prefixes lay there until a request used them again, or an eviction took them",
            "s",
            "pagestream_kv_block_lifetime_seconds",
            f'{SELECTED},state="cached"',
        ),
    ]


def service_panels() -> list[Panel]:
    http = "pagestream_http_request_duration_seconds"
    failures = f'sum(rate({http}_count{{{PROCESS},code=~"5.."}}[$__rate_interval])) or vector(0)'
    generated = "pagestream_generation_tokens_total"
    inference = f'{PROCESS},route=~"/v1/(.*completions|messages|responses|embeddings)"'
    return [
        stat("Requests", "Answered a second", "reqps", f"sum(rate({http}_count{{{inference}}}[$__rate_interval]))"),
        stat("Errors", "Answers with a status of 500 or more, a second", "reqps", failures),
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
    ]


def engine_panels() -> list[Panel]:
    step_seconds = "pagestream_step_duration_seconds"
    return [
        stat("Workers up", "Serving now", "short", f"sum(pagestream_worker_up{{{SELECTED}}})"),
        stat(
            "Steps",
            "Engine steps a second",
            "ops",
            f"sum(rate(pagestream_step_batch_tokens_count{{{SELECTED}}}[$__rate_interval]))",
        ),
        stat(
            "Last step",
            "Seconds since the last step of the worker that is furthest behind",
            "s",
            f"max(time() - (pagestream_worker_last_step_timestamp_seconds{{{SELECTED}}} > 0))",
        ),
        stat("Queued", "Accepted, not claimed by a worker", "short", in_queue("pagestream_queue_depth", ALL_QUEUES)),
        stat("Oldest", "Age of the oldest unclaimed one", "s", f"max(pagestream_queue_oldest_age_seconds{{{MODEL}}})"),
        stat("Claimed", "Held by workers, not finished", "short", in_queue("pagestream_queue_pending", ALL_QUEUES)),
        stack(
            "Step by phase",
            "Mean time of an engine step",
            "s",
            {"{{phase}}": mean(step_seconds, SELECTED, "phase")},
        ),
        lines(
            "Batch",
            "Mean tokens and requests of a step",
            "short",
            {
                "tokens": mean("pagestream_step_batch_tokens", SELECTED),
                "requests": mean("pagestream_step_batch_requests", SELECTED),
            },
        ),
        heatmap("Requests in a step, spread", "How full the batches are", "short", "pagestream_step_batch_requests",
                SELECTED),
        lines(
            "Queue",
            "Requests that wait for a worker, those that a worker holds, and those that kept killing workers",
            "short",
            {
                "waiting": in_queue("pagestream_queue_depth", ALL_QUEUES),
                "claimed": in_queue("pagestream_queue_pending", ALL_QUEUES),
                "dead letters": in_queue("pagestream_dead_letters"),
            },
        ),
        stack(
            "Device memory",
            "Of each worker's device: weights, KV pool, workspace (activations and graphs), what others use, and free",
            "bytes",
            {"{{worker}} {{use}}": f"sum by (worker, use) (pagestream_device_memory_bytes{{{SELECTED}}})"},
        ),
        stack(
            "A request's time",
            "Mean seconds in the queue, until the first token, and from there to the end",
            "s",
            {
                part: mean(f"pagestream_request_{part}_time_seconds", SELECTED)
                for part in ("queue", "prefill", "decode")
            },
        ),
        lines(
            "Round trips to the store",
            "Mean time of the gateways' commands; their failures are beside",
            "s",
            {
                "{{command}}": mean("pagestream_redis_command_duration_seconds", PROCESS, "command"),
                "failures a second": total_rate("pagestream_redis_errors_total", PROCESS),
            },
        ),
        lines(
            "Takeovers",
            "Requests taken from workers that died, and lives of workers in the store",
            "ops",
            {
                "requests": total_rate("pagestream_queue_reclaims_total", SELECTED),
                "lives": total_rate("pagestream_worker_incarnations_total", SELECTED),
            },
        ),
        lines(
            "Requests ended by the engines",
            "By reason",
            "ops",
            {"{{reason}}": rate("pagestream_requests_finished_total", "reason", SELECTED)},
        ),
        lines(
            "Refused before acceptance",
            "By reason; clients are told when to come again",
            "ops",
            {"{{reason}}": rate("pagestream_requests_rejected_total", "reason", MODEL)},
        ),
        lines(
            "Delivery",
            "Journals read after a gap or quiet, requests given back to a store that lost them, unreadable messages",
            "ops",
            {
                "journal reads": total_rate("pagestream_gateway_journal_reads_total", MODEL),
                "gaps": total_rate("pagestream_gateway_pubsub_gaps_total", MODEL),
                "restored": total_rate("pagestream_gateway_restored_requests_total", MODEL),
                "unreadable": total_rate("pagestream_gateway_bad_messages_total", MODEL),
            },
        ),
    ]  # fmt: skip


def build() -> dict[str, str]:
    """File name -> content."""
    dashboards = {
        "kv.json": dashboard("pagestream-kv", "Pagestream: KV memory", kv_panels()),
        "service.json": dashboard("pagestream-service", "Pagestream: service", service_panels()),
        "engine.json": dashboard("pagestream-engine", "Pagestream: engine and queue", engine_panels()),
    }
    return {name: json.dumps(content, indent=2) + "\n" for name, content in dashboards.items()}


if __name__ == "__main__":
    for file_name, content in build().items():
        (DASHBOARDS / file_name).write_text(content)
