"""Series and expressions shared by several panels."""

from monitoring.panels import RATE, total_rate

PROCESS = 'job=~"$job"'  # series of all programs, or only of gateways
MODEL = f'{PROCESS},model=~"$model"'  # gateway series by model
ALL_QUEUES = f'{MODEL},stream="all"'
SELECTED = f'{MODEL},worker=~"$worker"'  # worker series


def requests_in(state: str) -> str:
    return f'sum(pagestream_requests{{{SELECTED},state="{state}"}})'


def in_queue(metric: str, selected: str = MODEL) -> str:
    """Sum a store metric over models; all gateways report the same value, because they read the same store."""
    return f"sum(max by (model) ({metric}{{{selected}}}))"


def average(ratio: str) -> str:
    return f"avg({ratio}{{{SELECTED}}})"


def hit_rate() -> str:
    """Return the share of prompt tokens that were not computed."""
    computed = f'sum(rate(pagestream_prompt_tokens_total{{{SELECTED},source="computed"}}{RATE}))'
    return f"1 - {computed} / {total_rate('pagestream_prompt_tokens_total', SELECTED)}"
