"""Panels of the KV blocks: state, transfers and lifetime."""

from monitoring.panels import Panel, heatmap, lines, mean, quantile, rate, stack, stat, total_rate
from monitoring.queries import SELECTED, average, hit_rate, requests_in


def kv_panels() -> list[Panel]:
    return [
        stat("KV usage", "Active blocks / capacity", "percentunit", average("pagestream_kv_usage_ratio")),
        stat(
            "Internal waste",
            "Empty slots / slots in active blocks; only a sequence's last block has empty slots",
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
        stat("Waiting", "Claimed requests without blocks on the device", "short", requests_in("waiting")),
        stack(
            "KV blocks by state",
            "Active, cached and free add up to the capacity of each device",
            "short",
            {"{{device}} {{state}}": f"sum by (device, state) (pagestream_kv_blocks{{{SELECTED}}})"},
        ),
        stack(
            "KV blocks by group of layers",
            "Blocks in the tables of running requests; groups with a window keep only its blocks",
            "short",
            {"group {{group}}": f"sum by (group) (pagestream_kv_group_blocks{{{SELECTED}}})"},
        ),
        lines(
            "Requests by state",
            "Requests in the engines; waiting requests hold no blocks, swapped requests hold host blocks",
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
            "Duration of the transfers of one step, which overlap with the step",
            "s",
            {
                "mean {{direction}}": mean("pagestream_kv_swap_duration_seconds", SELECTED, "direction"),
                "p99 {{direction}}": quantile(0.99, "pagestream_kv_swap_duration_seconds", SELECTED, "direction"),
            },
        ),
        lines(
            "Preemptions",
            "Preempted sequences, by how their KV is restored",
            "ops",
            {"{{mode}}": rate("pagestream_preemptions_total", "mode", SELECTED)},
        ),
        stack(
            "KV blocks on the host",
            "Blocks of swapped requests, and prefixes evicted from the device",
            "short",
            {"{{state}}": f"sum by (state) (pagestream_kv_host_blocks{{{SELECTED}}})"},
        ),
        stack(
            "Recurrent states",
            "States of hybrid models: of running requests, kept for later prompts, and in host memory",
            "short",
            {
                "{{state}}": f'sum by (state) (pagestream_recurrent_states{{{SELECTED},state!="free"}})',
                "{{state}}, host": f'sum by (state) (pagestream_host_recurrent_states{{{SELECTED},state!="free"}})',
            },
        ),
        stack(
            "Prompt tokens by source",
            "Prompt tokens computed, or found in a cache",
            "short",
            {"{{source}}": rate("pagestream_prompt_tokens_total", "source", SELECTED)},
        ),
        lines(
            "Copied and evicted blocks",
            "Copy-on-write copies of shared blocks, and evicted cached blocks",
            "ops",
            {
                "copy on write": total_rate("pagestream_kv_copy_on_write_blocks_total", SELECTED),
                "evicted": total_rate("pagestream_kv_evicted_blocks_total", SELECTED),
            },
        ),
        heatmap(
            "Block lifetime in use",
            "How long requests held the blocks released in each interval",
            "s",
            "pagestream_kv_block_lifetime_seconds",
            f'{SELECTED},state="active"',
        ),
        heatmap(
            "Block lifetime in the cache",
            "How long blocks stayed cached until reuse or eviction",
            "s",
            "pagestream_kv_block_lifetime_seconds",
            f'{SELECTED},state="cached"',
        ),
    ]
