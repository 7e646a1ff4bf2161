"""Profile steps on a CUDA device: kernels by name, and the device's idle time between them.

Decode steps are taken from the middle of a run in which the whole batch decodes; a long prompt is profiled completely.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from bench.engine.sections import Bench
from bench.engine.session import RunLog

CASES = ((1, 1024), (8, 1024), (32, 1024), (256, 1024))
FIRST_STEP, NUM_STEPS = 20, 16  # of the steps in which the whole batch decodes
NUM_KERNELS = 24
FIRST_KERNEL = "_unpack_inputs_kernel"  # first kernel of every step on a CUDA device
PREFILL_TOKENS = 8192


def profile(bench: Bench) -> Iterator[dict[str, Any]]:
    for batch, prompt_tokens in CASES:
        recorder = _Recorder(batch)
        bench.session.run(bench.uniform(batch, prompt_tokens, 96), recorder.after_step)
        figures = _figures(recorder.profiler, NUM_STEPS)
        yield {"what": "profile_decode", "batch": batch, "prompt": prompt_tokens, **figures}
    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiler:
        bench.session.run(bench.uniform(1, PREFILL_TOKENS, 1))
    yield {"what": "profile_prefill", "prompt": PREFILL_TOKENS, **_figures(profiler, 1)}


class _Recorder:
    def __init__(self, batch: int) -> None:
        self.profiler = torch_profile(activities=[ProfilerActivity.CUDA])
        self._batch = batch
        self._num_full_steps = 0

    def after_step(self, log: RunLog) -> None:
        self._num_full_steps += log.step_tokens[-1] == self._batch
        if self._num_full_steps == FIRST_STEP:
            self.profiler.start()
        elif self._num_full_steps == FIRST_STEP + NUM_STEPS:
            self.profiler.stop()


def _figures(profiler: torch_profile, num_steps: int) -> dict[str, Any]:
    """Return the figures in microseconds.

    `idle_us_a_step` is the time without a kernel or copy on the device, including gaps between the kernels of a graph.
    An entry of `top` is a kernel's name, its launches, the sum of their durations, and the sum of what each adds to a
    step: the time since the kernel before it ended. Durations overlap, because a kernel may start early and wait.
    `between_steps_us` lists the gaps before a step's first kernel, ascending.
    """
    results = profiler.profiler.kineto_results if profiler.profiler else None
    spans = [
        (event.start_ns() / 1e3, event.duration_ns() / 1e3, event.name())
        for event in (results.events() if results else ())
        if str(event.device_type()).endswith("CUDA") and event.duration_ns() > 0
    ]
    if not spans:
        return {}
    total, added, count = defaultdict[str, float](float), defaultdict[str, float](float), Counter[str]()
    last_end = spans[0][0]
    for start, duration, name in sorted(spans, key=_end):
        total[name[:110]] += duration
        added[name[:110]] += start + duration - last_end
        count[name[:110]] += 1
        last_end = start + duration
    longest = sorted(total.items(), key=lambda entry: entry[1], reverse=True)[:NUM_KERNELS]
    span, busy, gaps = busy_and_gaps(sorted(spans))
    return {
        "steps": num_steps,
        "span_us_a_step": round(span / num_steps, 1),
        "busy_us_a_step": round(busy / num_steps, 1),
        "idle_us_a_step": round((span - busy) / num_steps, 1),
        "longest_gaps_us": [round(gap, 1) for gap, _ in sorted(gaps, reverse=True)[:16]],
        "between_steps_us": sorted(round(gap, 1) for gap, after in gaps if FIRST_KERNEL in after),
        "kernels": len(spans),
        "top": [[name, count[name], round(microseconds, 1), round(added[name], 1)] for name, microseconds in longest],
    }


def _end(span: tuple[float, float, str]) -> float:
    start, duration, _ = span
    return start + duration


def busy_and_gaps(spans: list[tuple[float, float, str]]) -> tuple[float, float, list[tuple[float, str]]]:
    """Return (time from first start to last end, busy time, gaps with the name of what ran next).

    `spans` are (start, duration, name), ascending.
    """
    first = end = spans[0][0]
    busy, gaps = 0.0, []
    for start, duration, name in spans:
        if start > end:
            gaps.append((start - end, name))
        if start + duration > end:
            busy += start + duration - max(start, end)
            end = start + duration
    return end - first, busy, gaps
