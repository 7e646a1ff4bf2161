"""Compute the figures of a load run from its results."""

from typing import Any

from bench.serving.streaming_request import RequestResult
from bench.statistics import distribution

LATENCIES = ("time_to_first_token", "time_per_output_token", "inter_token", "end_to_end")


def samples(results: list[RequestResult]) -> dict[str, list[float]]:
    """Return all measurements of successful requests by latency, in seconds."""
    good = [result for result in results if not result.failure]
    per_token = [result.time_per_output_token_seconds for result in good]
    return {
        "time_to_first_token": [result.time_to_first_token_seconds for result in good],
        "time_per_output_token": [seconds for seconds in per_token if seconds is not None],
        "inter_token": [seconds for result in good for seconds in result.inter_token_seconds],
        "end_to_end": [result.duration_seconds for result in good],
    }


def summarize(load: dict[str, Any], results: list[RequestResult]) -> dict[str, Any]:
    """Summarize a run; throughput counts usage tokens, from the first request sent to the last token."""
    good = [result for result in results if not result.failure]
    failures = [result.failure for result in results if result.failure]
    summary: dict[str, Any] = {
        "load": load,
        "requests": len(results),
        "failed_requests": len(failures),
        "failures": sorted(set(failures))[:10],
    }
    if not good:
        return summary
    duration_seconds = max(result.event_times[-1] for result in good) - min(result.sent_at for result in results)
    prompt_tokens = sum(result.prompt_tokens for result in good)
    output_tokens = sum(result.completion_tokens for result in good)
    summary |= {
        "duration_seconds": duration_seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_second": len(good) / duration_seconds,
        "output_tokens_per_second": output_tokens / duration_seconds,
        "total_tokens_per_second": (prompt_tokens + output_tokens) / duration_seconds,
        "events_per_token": sum(len(result.event_times) for result in good) / output_tokens,
    }
    for name, values in samples(results).items():
        summary[f"{name}_seconds"] = distribution(values)
    return summary
