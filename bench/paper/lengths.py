"""Lengths and Poisson arrivals of the requests in the paper's figures; seeded.

The data sets are not included. Lengths are lognormal with the paper's means (figure 11). The paper does not give the
spread, which decides how much a reservation wastes, so the coefficients of variation are fitted or estimated.
"""
# Coefficients of variation:
# - outputs, ShareGPT 0.95 and Alpaca 1.1: each fitted to one number, the sequences that Orca (Oracle) runs in figure
# 13;
#   the other policies' numbers follow. First turns of ShareGPT (other tokenizer, shorter than 2048) have 0.75.
# - prompts, ShareGPT 1.76: measured on those first turns. Alpaca 0.7: a guess, which hardly matters at 19 tokens.
# - WMT16 English to German: 30 prompt tokens after the shared prefix, 45 output tokens, 0.5: a guess.

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    mean_tokens: float
    variation: float  # standard deviation / mean

    def draw(self, generator: random.Random) -> int:
        sigma_squared = math.log1p(self.variation**2)
        mu = math.log(self.mean_tokens) - sigma_squared / 2
        return max(1, round(generator.lognormvariate(mu, math.sqrt(sigma_squared))))


@dataclass(frozen=True, slots=True)
class Dataset:
    name: str
    prompt: LengthDistribution
    output: LengthDistribution
    max_model_len: int = 2048  # OPT's context; longer draws are cut, as in the paper

    def lengths(self, seed: int) -> Iterator[tuple[int, int]]:
        """Yield (prompt tokens, output tokens) without end."""
        generator = random.Random(f"{self.name}/{seed}")
        while True:
            prompt_tokens = min(self.prompt.draw(generator), self.max_model_len // 2)
            yield prompt_tokens, min(self.output.draw(generator), self.max_model_len - prompt_tokens)


# 161.31 and 337.99 after cutting at the context length.
SHAREGPT = Dataset("ShareGPT", LengthDistribution(174.3, 1.76), LengthDistribution(341.8, 0.95))
ALPACA = Dataset("Alpaca", LengthDistribution(19.31, 0.7), LengthDistribution(58.45, 1.1))
TRANSLATION = Dataset("WMT16", LengthDistribution(30.0, 0.5), LengthDistribution(45.0, 0.5))


def chat_lengths(rounds: Dataset, window_tokens: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield turns of conversations: the prompt is the history's last `window_tokens`, which also bound the output.

    A conversation continues with probability 0.8, a guess; so most prompts fill the window, as the paper says.
    """
    generator = random.Random(f"chat/{seed}")
    history_tokens = 0
    for prompt_tokens, output_tokens in rounds.lengths(seed):
        yield min(window_tokens, history_tokens + prompt_tokens), min(window_tokens, output_tokens)
        history_tokens += prompt_tokens + output_tokens
        if generator.random() > 0.8:
            history_tokens = 0


@dataclass(frozen=True, slots=True)
class TimedRequest:
    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0  # the first prompt tokens, equal in all requests
    num_sequences: int = 1  # choices or beams
    is_beam_search: bool = False


def poisson_trace(
    lengths: Iterable[tuple[int, int]],
    requests_per_second: float,
    duration_seconds: float,
    *,
    seed: int = 0,
    shared_prefix_tokens: int = 0,
) -> list[TimedRequest]:
    """Return arrivals within [0, duration). All rates have the same lengths in the same order, and scaled gaps.

    `lengths` exclude the shared prefix.
    """
    generator = random.Random(seed)
    gaps = iter(lambda: generator.expovariate(1.0) / requests_per_second, None)
    trace = []
    for arrival_seconds, (prompt_tokens, output_tokens) in zip(accumulate(gaps), lengths, strict=False):
        if arrival_seconds >= duration_seconds:
            break
        all_prompt_tokens = shared_prefix_tokens + prompt_tokens
        trace.append(TimedRequest(arrival_seconds, all_prompt_tokens, output_tokens, shared_prefix_tokens))
    return trace
