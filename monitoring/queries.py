"""Which series the dashboards read, and the expressions that several panels share."""

from monitoring.panels import RATE, total_rate

PROCESS = 'job=~"$job"'  # series that every program has, or only gateways
MODEL = f'{PROCESS},model=~"$model"'  # of a gateway, by model
ALL_QUEUES = f'{MODEL},stream="all"'
SELECTED = f'{MODEL},worker=~"$worker"'  # of a worker


def requests_in(state: str) -> str:
    return f'sum(pagestream_requests{{{SELECTED},state="{state}"}})'


def in_queue(metric: str, selected: str = MODEL) -> str:
    """The metric of all models. Every gateway tells the same of one: they look at the same store."""
    return f"sum(max by (model) ({metric}{{{selected}}}))"


def average(ratio: str) -> str:
    return f"avg({ratio}{{{SELECTED}}})"


def hit_rate() -> str:
    """Prompt tokens that were not computed, of all of them."""
    computed = f'sum(rate(pagestream_prompt_tokens_total{{{SELECTED},source="computed"}}{RATE}))'
    return f"1 - {computed} / {total_rate('pagestream_prompt_tokens_total', SELECTED)}"
