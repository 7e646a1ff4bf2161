"""Building blocks of Grafana dashboards: panels, queries, variables and layout.

Every panel has a unit and a description. Counters use rate(); ratios are averaged, never summed.
"""

from typing import Any

RATE = "[$__rate_interval]"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Panel = dict[str, Any]


def stat(title: str, description: str, unit: str, expression: str) -> Panel:
    return _panel("stat", title, description, unit, {title: expression})


def lines(title: str, description: str, unit: str, queries: dict[str, str]) -> Panel:
    """Make a panel of lines; `queries` maps legends to PromQL, here and below."""
    return _panel("timeseries", title, description, unit, queries, fillOpacity=10, showPoints="never")


def stack(title: str, description: str, unit: str, queries: dict[str, str]) -> Panel:
    style = {"fillOpacity": 60, "lineWidth": 0, "stacking": {"mode": "normal", "group": "A"}}
    return _panel("timeseries", title, description, unit, queries, showPoints="never", **style)


def heatmap(title: str, description: str, unit: str, histogram: str, selected: str) -> Panel:
    expression = f"sum by (le) (increase({histogram}_bucket{{{selected}}}{RATE}))"
    content = _panel("heatmap", title, description, unit, {"{{le}}": expression})
    content["targets"][0]["format"] = "heatmap"
    content["options"] = {"calculate": False, "yAxis": {"unit": unit}, "cellGap": 1, "color": {"scheme": "Oranges"}}
    return content


def rate(metric: str, by: str, selected: str) -> str:
    return f"sum by ({by}) (rate({metric}{{{selected}}}{RATE}))"


def total_rate(metric: str, selected: str) -> str:
    return f"sum(rate({metric}{{{selected}}}{RATE}))"


def mean(histogram: str, selected: str, by: str = "") -> str:
    grouping = f" by ({by}) " if by else ""
    total, count = (f"sum{grouping}(rate({histogram}_{part}{{{selected}}}{RATE}))" for part in ("sum", "count"))
    return f"{total} / {count}"


def quantiles(histogram: str, selected: str) -> dict[str, str]:
    buckets = f"sum by (le) (rate({histogram}_bucket{{{selected}}}{RATE}))"
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {name: f"histogram_quantile({share}, {buckets})" for name, share in shares.items()}


def quantile(share: float, histogram: str, selected: str, by: str) -> str:
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({histogram}_bucket{{{selected}}}{RATE})))"


def dashboard(uid: str, title: str, panels: list[Panel]) -> dict[str, Any]:
    return {
        "uid": uid,
        "title": title,
        "tags": ["pagestream"],
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "schemaVersion": 39,
        "links": [{"type": "dashboards", "tags": ["pagestream"], "title": "Pagestream", "asDropdown": True}],
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                _variable("job", 'label_values({__name__=~"pagestream_worker_up|pagestream_redis_up"}, job)'),
                _variable("model", 'label_values(pagestream_worker_up{job=~"$job"}, model)'),
                _variable("worker", 'label_values(pagestream_worker_up{job=~"$job",model=~"$model"}, worker)'),
            ]
        },
        "panels": _placed(panels),
    }


def _panel(kind: str, title: str, description: str, unit: str, queries: dict[str, str], **custom: Any) -> Panel:
    """Make a panel; `custom` are the field's custom options."""
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
    """Place the tiles in one row of six, then two panels per row."""
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
