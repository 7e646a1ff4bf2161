"""Panels of the engine: step phases, queue, memory, ranks, delivery and recovery."""

from monitoring.panels import Panel, heatmap, lines, mean, rate, stack, stat, total_rate
from monitoring.queries import ALL_QUEUES, MODEL, PROCESS, SELECTED, in_queue


def engine_panels() -> list[Panel]:
    step_seconds = "pagestream_step_duration_seconds"
    return [
        stat("Workers up", "Workers that serve requests", "short", f"sum(pagestream_worker_up{{{SELECTED}}})"),
        stat(
            "Steps",
            "Engine steps per second",
            "ops",
            f"sum(rate(pagestream_step_batch_tokens_count{{{SELECTED}}}[$__rate_interval]))",
        ),
        stat(
            "Last step",
            "Longest time since a worker's last step",
            "s",
            f"max(time() - (pagestream_worker_last_step_timestamp_seconds{{{SELECTED}}} > 0))",
        ),
        stat(
            "Queued", "Requests that no worker has claimed", "short", in_queue("pagestream_queue_depth", ALL_QUEUES)
        ),
        stat(
            "Oldest",
            "Age of the oldest unclaimed request",
            "s",
            f'max by (stream) (pagestream_queue_oldest_age_seconds{{{MODEL},stream!="all"}})',
        ),
        stat(
            "Claimed", "Unfinished requests held by workers", "short", in_queue("pagestream_queue_pending", ALL_QUEUES)
        ),
        stack(
            "Step by phase",
            "Mean duration of an engine step, by phase",
            "s",
            {"{{phase}}": mean(step_seconds, SELECTED, "phase")},
        ),
        lines(
            "Batch",
            "Mean tokens and requests per step",
            "short",
            {
                "tokens": mean("pagestream_step_batch_tokens", SELECTED),
                "requests": mean("pagestream_step_batch_requests", SELECTED),
            },
        ),
        heatmap(
            "Requests per step, distribution", "Steps by number of requests", "short", "pagestream_step_batch_requests",
            SELECTED,
        ),
        lines(
            "Queue",
            "Unfinished requests, of them waiting for and claimed by a worker; requests that exceeded the crash "
            "limit (dead letters)",
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
            "By worker: weights, KV pool, workspace (activations and graphs), other processes, and free memory",
            "bytes",
            {"{{worker}} {{use}}": f"sum by (worker, use) (pagestream_device_memory_bytes{{{SELECTED}}})"},
        ),
        stack(
            "Request phases",
            "Mean time in the queue, until the first token, and from the first to the last token",
            "s",
            {
                part: mean(f"pagestream_request_{part}_time_seconds", SELECTED)
                for part in ("queue", "prefill", "decode")
            },
        ),
        lines(
            "Store round trips",
            "Mean duration of gateway commands by type, and failures per second",
            "s",
            {
                "{{command}}": mean("pagestream_redis_command_duration_seconds", PROCESS, "command"),
                "failures per second": total_rate("pagestream_redis_errors_total", PROCESS),
            },
        ),
        lines(
            "Takeovers",
            "Requests taken over from dead workers, claims returned before the start, worker registrations",
            "ops",
            {
                "requests": total_rate("pagestream_queue_reclaims_total", SELECTED),
                "returned": total_rate("pagestream_queue_given_back_total", SELECTED),
                "registrations": total_rate("pagestream_worker_incarnations_total", SELECTED),
            },
        ),
        lines(
            "Prefix affinity",
            "Claimed requests, by the worker whose prefix cache probably has their prefix",
            "ops",
            {"{{home}}": rate("pagestream_claimed_requests_total", "home", SELECTED)},
        ),
        lines(
            "Ranks up",
            "Workers with several ranks: 1 for each rank that is alive and has its part of the model",
            "short",
            {"{{worker}} {{rank}}": f"min by (worker, rank) (pagestream_rank_up{{{SELECTED}}})"},
        ),
        lines(
            "Rank skew",
            "Time until the last rank read the latest step, and share of time that rank 0 waited for other ranks",
            "s",
            {
                "{{worker}} skew": f"max by (worker) (pagestream_step_skew_seconds{{{SELECTED}}})",
                "{{worker}} waits": rate("pagestream_channel_wait_seconds_total", "worker", SELECTED),
            },
        ),
        lines(
            "All-reduce path",
            "1 for the all-reduce implementation in use: peer memory (own, symmetric_memory), nccl or gloo",
            "short",
            {"{{worker}} {{path}}": f"max by (worker, path) (pagestream_all_reduce_info{{{SELECTED}}})"},
        ),
        lines(
            "Recovered errors",
            "Retried store writes, failed queue reads, failed and unreadable heartbeats, duplicate tokens, and "
            "diverged streams (regenerated tokens that differ from sent ones)",
            "ops",
            {
                "store retries": total_rate("pagestream_store_retries_total", SELECTED),
                "queue reads": total_rate("pagestream_queue_read_failures_total", SELECTED),
                "failed heartbeats": total_rate("pagestream_heartbeat_failures_total", SELECTED),
                "unreadable heartbeats": total_rate("pagestream_bad_heartbeats_total", SELECTED),
                "duplicate tokens": total_rate("pagestream_gateway_repeated_tokens_total", MODEL),
                "diverged streams": total_rate("pagestream_gateway_torn_streams_total", MODEL),
            },
        ),
        lines(
            "Declared dead",
            "Workers declared dead by their peers, and requests ended because their gateway was gone",
            "ops",
            {
                "workers": total_rate("pagestream_workers_reaped_total", SELECTED),
                "requests": total_rate("pagestream_orphaned_requests_total", SELECTED),
            },
        ),
        lines(
            "Finished requests",
            "Requests that the engines finished, by reason",
            "ops",
            {"{{reason}}": rate("pagestream_requests_finished_total", "reason", SELECTED)},
        ),
        lines(
            "Rejected requests",
            "Requests rejected before acceptance, by reason; responses have Retry-After",
            "ops",
            {"{{reason}}": rate("pagestream_requests_rejected_total", "reason", MODEL)},
        ),
        lines(
            "Delivery",
            "Journal reads after gaps or silence, requests restored to a store that lost them, unreadable messages",
            "ops",
            {
                "journal reads": total_rate("pagestream_gateway_journal_reads_total", MODEL),
                "gaps": total_rate("pagestream_gateway_pubsub_gaps_total", MODEL),
                "restored": total_rate("pagestream_gateway_restored_requests_total", MODEL),
                "unreadable": total_rate("pagestream_gateway_bad_messages_total", MODEL),
            },
        ),
    ]  # fmt: skip
