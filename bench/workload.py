"""The requests of a load run: lengths, prompts and arrival times. The same seed gives the same load.

A trace is a JSON list of [prompt_tokens, output_tokens] pairs, or an object with that list as `pairs`.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "family", "group")


class WorkloadError(ValueError):
    """A trace or an option is invalid."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    arrival_seconds: float  # after the start of the run; 0 if the run is bounded by concurrency
    prompt: list[int] | str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    lengths: list[tuple[int, int]]
    token_ids: range  # range of random prompt tokens
    seed: int
    chat: bool = False

    def requests(self, rate_per_second: float, stream: str = "") -> Iterator[PlannedRequest]:
        """Yield Poisson arrivals, all at once for an infinite rate; each `stream` has its own prompts."""
        generator = random.Random(f"{self.seed}/{stream}")
        arrival_seconds = 0.0
        for prompt_tokens, output_tokens in self.lengths:
            prompt = self._prompt(generator, prompt_tokens)
            yield PlannedRequest(arrival_seconds, prompt, prompt_tokens, output_tokens)
            arrival_seconds += generator.expovariate(rate_per_second) if rate_per_second != float("inf") else 0.0

    def _prompt(self, generator: random.Random, prompt_tokens: int) -> list[int] | str:
        if self.chat:  # a common English word is one token of most tokenizers; the template adds its own
            return " ".join(generator.choices(WORDS, k=prompt_tokens))
        return generator.choices(self.token_ids, k=prompt_tokens)


def read_trace(path: Path) -> list[tuple[int, int]]:
    try:
        content = json.loads(path.read_text())
        pairs = content["pairs"] if isinstance(content, dict) else content
        lengths = [(int(prompt_tokens), int(output_tokens)) for prompt_tokens, output_tokens in pairs]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"{path}: not a list of [prompt_tokens, output_tokens]: {error}") from error
    if not lengths or min(min(pair) for pair in lengths) < 1:
        raise WorkloadError(f"{path}: every length must be at least 1, and there must be one")
    return lengths


def take_lengths(lengths: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Return the first `count` lengths, starting over if there are fewer."""
    return list(islice(cycle(lengths), count))
