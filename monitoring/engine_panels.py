"""Panels of the engine: the parts of a step, the queue before it, the memory under it, and how tokens are delivered."""

from monitoring.panels import Panel, heatmap, lines, mean, rate, stack, stat, total_rate
from monitoring.queries import ALL_QUEUES, MODEL, PROCESS, SELECTED, in_queue


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
            "Requests accepted and not ended, of them those that wait for a worker and those that one holds, and those "
            "that kept killing workers",
            "short",
            {
                "unfinished": in_queue("pagestream_queue_unfinished", ALL_QUEUES),
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
            "Requests taken from dead workers, lives of workers in the store, requests given back before they began",
            "ops",
            {
                "requests": total_rate("pagestream_queue_reclaims_total", SELECTED),
                "given back": total_rate("pagestream_queue_given_back_total", SELECTED),
                "lives": total_rate("pagestream_worker_incarnations_total", SELECTED),
            },
        ),
        lines(
            "Ranks up",
            "Of workers whose model several ranks share: 1 for each rank that has its part of it and lives",
            "short",
            {"{{worker}} {{rank}}": f"min by (worker, rank) (pagestream_rank_up{{{SELECTED}}})"},
        ),
        lines(
            "Ranks apart",
            "Seconds until the last rank had read the latest step, and seconds a second that rank 0 waited for others",
            "s",
            {
                "{{worker}} skew": f"max by (worker) (pagestream_step_skew_seconds{{{SELECTED}}})",
                "{{worker}} waits": rate("pagestream_channel_wait_seconds_total", "worker", SELECTED),
            },
        ),
        lines(
            "Sums over ranks",
            "1 for what sums over a worker's ranks: memory that its GPUs share (own, symmetric_memory), nccl, gloo",
            "short",
            {"{{worker}} {{path}}": f"max by (worker, path) (pagestream_all_reduce_info{{{SELECTED}}})"},
        ),
        lines(
            "Made good",
            "Steps offered to the store again, reads of the queue and heartbeats that failed, heartbeats nobody could "
            "read, tokens that came twice, and streams whose tokens came otherwise",
            "ops",
            {
                "steps again": total_rate("pagestream_store_retries_total", SELECTED),
                "reads": total_rate("pagestream_queue_read_failures_total", SELECTED),
                "heartbeats not sent": total_rate("pagestream_heartbeat_failures_total", SELECTED),
                "heartbeats unreadable": total_rate("pagestream_bad_heartbeats_total", SELECTED),
                "tokens twice": total_rate("pagestream_gateway_repeated_tokens_total", MODEL),
                "streams torn": total_rate("pagestream_gateway_torn_streams_total", MODEL),
            },
        ),
        lines(
            "Given up for dead",
            "Workers that others found dead, and requests ended because their gateway was gone",
            "ops",
            {
                "workers": total_rate("pagestream_workers_reaped_total", SELECTED),
                "requests": total_rate("pagestream_orphaned_requests_total", SELECTED),
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
