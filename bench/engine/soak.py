"""Run random arrivals, lengths, sampling parameters and aborts on one engine.

    python -m bench soak --seconds 120 -- WORKER FLAGS

After every step the engine's counts must balance. Every request must end exactly once with consecutive token indices,
and at the end every block must be free. A small KV cache causes preemptions. Prints a summary as JSON; the exit status
is 1 after an error.
"""

import argparse
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from engine_worker.engine import Engine
from engine_worker.settings import WorkerSettings
from shared.messages import ErrorEvent, GenerationRequest, SamplingParams, StreamEvent, TokenEvent
from shared.settings import load_settings

MAX_WAITING = 64


@dataclass
class Soak:
    engine: Engine
    random: random.Random
    max_prompt_tokens: int
    max_output_tokens: int
    last_token_id: int
    beam_share: float = 0.03  # of the requests; during a beam search the engine does not schedule ahead
    num_tokens: dict[str, Counter[int]] = field(default_factory=dict)  # per choice, of unfinished requests
    ends: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    num_output_tokens: int = 0
    _prompts: list[list[int]] = field(default_factory=list)

    def step(self) -> None:
        if self.engine.stats().num_waiting < MAX_WAITING:
            for _ in range(self.random.choice([0, 0, 0, 1, 1, 2, 8])):
                self._add()
        if self.num_tokens and self.random.random() < 0.05:
            self._abort()
        for event in self.engine.step():
            self._take(event)
        self.engine.check_integrity()
        self.num_steps += 1

    def drain(self) -> None:
        while self.engine.has_work:
            for event in self.engine.step():
                self._take(event)
            self.engine.check_integrity()
        assert not self.num_tokens, f"unfinished requests: {list(self.num_tokens)[:5]}"
        assert self.engine.stats().kv_cache.num_active_blocks == 0, self.engine.stats().kv_cache

    def _add(self) -> None:
        request_id = f"soak-{self.num_steps}-{len(self.num_tokens)}-{self.random.getrandbits(32)}"
        sampling = self._beam_search() if self.random.random() < self.beam_share else self._sampling()
        self.num_tokens[request_id] = Counter()
        self.engine.add_request(
            GenerationRequest(request_id=request_id, prompt_token_ids=self._prompt(), sampling=sampling)
        )

    def _beam_search(self) -> SamplingParams:
        width = self.random.choice([2, 4])
        return SamplingParams(
            max_tokens=self.random.randint(1, self.max_output_tokens // 4 + 1),
            seed=0,
            temperature=0.0,
            ignore_eos=self.random.random() < 0.5,
            n=self.random.randint(1, width),
            use_beam_search=True,
            beam_width=width,
            early_stopping=self.random.choice([False, True]),
        )

    def _sampling(self) -> SamplingParams:
        greedy = self.random.random() < 0.4
        return SamplingParams(
            max_tokens=self.random.randint(1, self.max_output_tokens),
            seed=self.random.getrandbits(32),
            temperature=0.0 if greedy else self.random.choice([0.7, 1.0]),
            top_p=self.random.choice([1.0, 0.9]),
            top_k=self.random.choice([0, 50]),
            presence_penalty=self.random.choice([0.0] * 40 + [0.5]),
            ignore_eos=self.random.random() < 0.7,
            n=1 if greedy else self.random.choice([1, 1, 1, 3]),
            stop_token_ids=tuple(self.random.sample(range(self.last_token_id), self.random.choice([0, 0, 200]))),
        )

    def _prompt(self) -> list[int]:
        """Make a prompt; some start like an earlier one, to hit the prefix cache."""
        length = self.random.choice([1, 15, 16, 17, self.random.randint(1, self.max_prompt_tokens)])
        prompt = [self.random.randint(3, self.last_token_id) for _ in range(length)]
        if self._prompts and self.random.random() < 0.3:
            earlier = self.random.choice(self._prompts)
            shared = self.random.randint(1, len(earlier))
            prompt = (earlier[:shared] + prompt)[: self.max_prompt_tokens]
        self._prompts = [*self._prompts[-100:], prompt]
        return prompt

    def _abort(self) -> None:
        request_id = self.random.choice(list(self.num_tokens))
        self.engine.abort_request(request_id)
        self.engine.check_integrity()
        del self.num_tokens[request_id]
        self.ends["aborted"] += 1

    def _take(self, event: StreamEvent) -> None:
        num_tokens = self.num_tokens[event.request_id]  # KeyError: an event after the end
        if isinstance(event, TokenEvent):
            assert event.index == num_tokens[event.choice], f"{event} after {num_tokens[event.choice]} tokens"
            assert all(0 <= token_id <= self.last_token_id for token_id in event.token_ids), event
            num_tokens[event.choice] += len(event.token_ids)
            self.num_output_tokens += len(event.token_ids)
            return
        assert not isinstance(event, ErrorEvent), event
        assert event.usage.completion_tokens == num_tokens.total(), event
        self.ends[event.reason] += 1
        del self.num_tokens[event.request_id]


def main(argv: list[str]) -> int:
    own, worker_flags = _split(argv)
    options = _parser().parse_args(own)
    from engine_worker.__main__ import load_engine  # noqa: PLC0415 - imports torch

    settings = load_settings(WorkerSettings, worker_flags, os.environ, prog="soak").settings
    loaded = load_engine(settings, lambda phase, progress, detail: None)
    soak = Soak(
        loaded.engine,
        random.Random(options.seed),
        min(options.max_prompt_tokens, loaded.info.max_model_len - 2),
        options.max_output_tokens,
        options.last_token_id,
    )
    if loaded.engine.stats().kv_cache.num_state_blocks:
        soak.beam_share = 0.0  # models with recurrent states refuse beams
    ends_at = time.monotonic() + options.seconds
    error = None
    try:
        while time.monotonic() < ends_at:
            soak.step()
        soak.drain()
    except (AssertionError, KeyError, RuntimeError) as failure:
        error = repr(failure)[:2000]
    stats = loaded.engine.stats()
    summary = {
        "seconds": options.seconds,
        "steps": soak.num_steps,
        "output_tokens": soak.num_output_tokens,
        "ends": dict(soak.ends),
        "preemptions": dict(stats.counters.preemptions),
        "computed_tokens": stats.counters.computed_tokens,
        "recomputed_tokens": stats.counters.recomputed_tokens,
        "swapped_in_blocks": stats.counters.swapped_in_blocks,
        "copied_blocks": stats.kv_totals.copied_blocks,
        "error": error,
    }
    print(json.dumps(summary))
    return 1 if error else 0


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", metavar="SECONDS", type=float, default=120.0)
    parser.add_argument("--seed", metavar="N", type=int, default=0)
    parser.add_argument("--max-prompt-tokens", metavar="N", type=int, default=2000)
    parser.add_argument("--max-output-tokens", metavar="N", type=int, default=300)
    parser.add_argument("--last-token-id", metavar="N", type=int, default=49151)
    return parser
