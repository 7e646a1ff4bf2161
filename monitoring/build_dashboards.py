"""python monitoring/build_dashboards.py: write grafana/dashboards/*.json.

The JSON is committed, so that Grafana needs no build; a test holds it against this file. Every panel has a unit and a
description, counters are read through rate(), ratios are averaged and never summed.
"""

import json
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).parent / "grafana" / "dashboards"
SELECTED = 'model=~"$model",worker=~"$worker"'
RATE = "[$__rate_interval]"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Panel = dict[str, Any]


def panel(kind: str, title: str, description: str, unit: str, queries: dict[str, str], **custom: Any) -> Panel:
    """`queries`: legend -> PromQL. `custom` goes to the field's custom options."""
    targets = [
        {"refId": chr(ord("A") + position), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
        for position, (legend, expression) in enumerate(queries.items())
    ]
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}} if kind == "stat" else {"tooltip": {"mode": "multi"}},
    }


def stat(title: str, description: str, unit: str, expression: str) -> Panel:
    return panel("stat", title, description, unit, {title: expression})


def lines(title: str, description: str, unit: str, queries: dict[str, str]) -> Panel:
    return panel("timeseries", title, description, unit, queries, fillOpacity=10, showPoints="never")


def stack(title: str, description: str, unit: str, queries: dict[str, str]) -> Panel:
    style = {"fillOpacity": 60, "lineWidth": 0, "stacking": {"mode": "normal", "group": "A"}}
    return panel("timeseries", title, description, unit, queries, showPoints="never", **style)


def rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{{{SELECTED}}}{RATE}))"


def total_rate(metric: str) -> str:
    return f"sum(rate({metric}{{{SELECTED}}}{RATE}))"


def requests_in(state: str) -> str:
    return f'sum(pagestream_requests{{{SELECTED},state="{state}"}})'


def quantiles(histogram: str) -> dict[str, str]:
    buckets = f"sum by (le) (rate({histogram}_bucket{RATE}))"
    return {name: f"histogram_quantile({share}, {buckets})" for name, share in {"p50": 0.5, "p95": 0.95}.items()}


def kv_panels() -> list[Panel]:
    phase_seconds = "pagestream_step_duration_seconds"
    return [
        stat("KV usage", "Active blocks / capacity", "percentunit", f"avg(pagestream_kv_usage_ratio{{{SELECTED}}})"),
        stat(
            "Internal waste",
            "Empty slots / slots in active blocks: the ends of the last blocks",
            "percentunit",
            f"avg(pagestream_kv_internal_waste_ratio{{{SELECTED}}})",
        ),
        stat(
            "Sharing",
            "Blocks saved by sharing / blocks in all block tables",
            "percentunit",
            f"avg(pagestream_kv_sharing_ratio{{{SELECTED}}})",
        ),
        stat("Running", "Sequences in the batch", "short", requests_in("running")),
        stat("Waiting", "Claimed by a worker, without blocks", "short", requests_in("waiting")),
        stat("Output", "Tokens generated a second", "short", total_rate("pagestream_generation_tokens_total")),
        stack(
            "KV blocks by state",
            "Active, cached and free add up to the capacity of the device",
            "short",
            {"{{device}} {{state}}": f"sum by (device, state) (pagestream_kv_blocks{{{SELECTED}}})"},
        ),
        lines(
            "Requests by state",
            "Sequences in the engines; waiting ones hold no blocks",
            "short",
            {"{{state}}": f"sum by (state) (pagestream_requests{{{SELECTED}}})"},
        ),
        lines(
            "Swap",
            "Bytes moved between device and host memory",
            "Bps",
            {"{{direction}}": rate("pagestream_kv_swap_bytes_total", "direction")},
        ),
        lines(
            "Preemptions",
            "Sequences that gave up their blocks, by the way they get them back",
            "ops",
            {"{{mode}}": rate("pagestream_preemptions_total", "mode")},
        ),
        stack(
            "Step by phase",
            "Mean time of an engine step",
            "s",
            {"{{phase}}": f"{rate(f'{phase_seconds}_sum', 'phase')} / {rate(f'{phase_seconds}_count', 'phase')}"},
        ),
        lines(
            "Copied and evicted blocks",
            "Copy-on-write of shared blocks, and cached blocks given up",
            "ops",
            {
                "copy on write": total_rate("pagestream_kv_copy_on_write_blocks_total"),
                "evicted": total_rate("pagestream_kv_evicted_blocks_total"),
            },
        ),
        lines(
            "Time to first token",
            "From a request's arrival at the gateway",
            "s",
            quantiles("pagestream_time_to_first_token_seconds"),
        ),
        lines("Inter-token latency", "As clients see it", "s", quantiles("pagestream_inter_token_latency_seconds")),
    ]


def dashboard(uid: str, title: str, panels: list[Panel]) -> dict[str, Any]:
    return {
        "uid": uid,
        "title": title,
        "tags": ["pagestream"],
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "schemaVersion": 39,
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                _variable("model", "label_values(pagestream_worker_up, model)"),
                _variable("worker", 'label_values(pagestream_worker_up{model=~"$model"}, worker)'),
            ]
        },
        "panels": _placed(panels),
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    everything = {"text": "All", "value": "$__all"}
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": everything,
    }


def _placed(panels: list[Panel]) -> list[Panel]:
    """Tiles in one row of six, then two panels a row."""
    placed, tiles = [], 0
    for number, content in enumerate(panels):
        if content["type"] == "stat":
            position = {"x": 4 * tiles, "y": 0, "w": 4, "h": 4}
            tiles += 1
        else:
            row, column = divmod(number - tiles, 2)
            position = {"x": 12 * column, "y": 4 + 8 * row, "w": 12, "h": 8}
        placed.append({"id": number + 1, "gridPos": position, **content})
    return placed


def build() -> dict[str, str]:
    """File name -> content."""
    kv = dashboard("pagestream-kv", "Pagestream: KV memory", kv_panels())
    return {"kv.json": json.dumps(kv, indent=2) + "\n"}


if __name__ == "__main__":
    for file_name, content in build().items():
        (DASHBOARDS / file_name).write_text(content)
