"""Measure what speculative decoding costs and gains when drafts are right, wrong, or found by a proposer.

    python -m bench speculation MODEL_DIR --out FILE [--cases 1x1024,8x1024,32x1024] [--drafts 3] [--device cuda]
        [--load-format dummy] [--quantization fp8] [--head HEAD_DIR | --mtp | --prompt bench/engine/copy_edit.txt]

Each case decodes the same prompts without drafts, with those of an oracle (the tokens of the run before), at random,
at random with the automatic pause, and with the n-gram and suffix proposers. Proposers on the host must know the last
token, so no step runs ahead of them. `oracle, ahead` and `ngram_gpu` make the drafts on the device. Outputs are equal
on a CPU in float32 and with --deterministic; the number of equal ones is reported.

With a draft head, only its drafts are measured. Every step also runs the head: without drafts it stores its keys and
values only. A head of random weights drafts token 0: always wrong (`head, wrong`), or always right where no other token
is allowed (`head, right`).

With --prompt, all sequences get that text, and only the n-gram and suffix proposers are measured. The cases then name
any length.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.provenance import commit
from engine_worker.engine import Engine
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import DraftSettings, ExecutionSettings
from engine_worker.execution.step.describe import Lookahead
from engine_worker.execution.step.draft_description import DraftDescription
from engine_worker.execution.step.draft_maker import DraftMaker, SampledSteps
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.execution.step.ngram_drafts import NgramDrafts
from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.sequence import Sequence
from engine_worker.model.draft_head.files import DraftHeadFiles
from engine_worker.model.model_input import ModelInput
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig
from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.draft_gain import DraftGain
from engine_worker.scheduling.speculation.drafting import Drafting, DraftLimits, Proposer
from engine_worker.scheduling.speculation.proposers import PROPOSERS
from kernels.draft_inputs import begin_drafts
from kernels.draft_inputs_reference import LastDrafts
from shared.messages import GenerationRequest, SamplingParams, TokenEvent

Tokens = dict[str, list[int]]

_MAX_TOKENS = 8192  # of a step


class _Guesses:
    """A proposer that asks a function."""

    def __init__(self, guess: Callable[[Sequence], list[int]]) -> None:
        self._guess = guess

    def propose(self, sequence: Sequence, max_drafts: int) -> list[int]:
        return self._guess(sequence)[:max_drafts]

    def ended(self, sequences: object) -> None:
        """Nothing is kept."""


class _KnownDrafts:
    """Drafts the known continuations on the device. Implements DraftMaker."""

    follows_all_steps = False

    def __init__(self, known: Tokens, last: LastDrafts, max_model_len: int) -> None:
        self._known, self._last = known, last
        self._sampled = SampledSteps(len(last.kept_rows), last.drafts.device)
        self._texts: dict[tuple[str, ...], Tensor] = {}
        self.lookahead = Lookahead(0, max_model_len)

    @torch.inference_mode()
    def launch(
        self, model_input: ModelInput, key: object, sampled: Tensor, description: DraftDescription, number: int
    ) -> Tensor | None:
        drafting = description.drafting
        self._sampled.write(description, description.table_rows, sampled)
        begin_drafts(self._sampled.step(model_input, len(drafting)), self._last)
        if not number or not drafting:
            return None
        texts, drafts = self._texts_of(drafting), self._last.drafts[:number, : len(drafting)]
        places = self._last.kept_positions[: len(drafting), None] + torch.arange(2, 2 + number, device=texts.device)
        drafts.copy_(texts.gather(1, places.clamp(max=texts.shape[1] - 1)).t())
        return drafts

    def _texts_of(self, drafting: list[Sequence]) -> Tensor:
        names = tuple(sequence.request_id for sequence in drafting)
        if names not in self._texts:
            texts = [
                sequence.token_ids(0, sequence.num_prompt_tokens) + self._known[name]
                for name, sequence in zip(names, drafting, strict=True)
            ]
            self._texts[names] = torch.tensor(texts, device=self._last.drafts.device)
        return self._texts[names]


class Speculation:
    def __init__(
        self,
        runner: ModelRunner,
        max_drafts: int,
        max_tokens: int,
        head: DraftHeadFiles | None = None,
        prompt: list[int] | None = None,
    ) -> None:
        """Measure on `runner`. `prompt`: of all sequences; default: random ones."""
        self._runner, self._head, self._maker = runner, head, runner.draft_maker
        self._prompt = prompt
        self._max_drafts = max_drafts
        self._max_tokens = max_tokens

    def case(self, num_sequences: int, prompt_tokens: int) -> dict[str, Any]:
        random = Random(1)
        prompts = [
            self._prompt or [random.randrange(100, 1000) for _ in range(prompt_tokens)] for _ in range(num_sequences)
        ]
        self._runner.draft_maker = self._maker if self._head is not None else None
        self._decode(prompts, None, 0.0)  # warm-up
        known, plain = self._decode(prompts, None, 0.0)
        figures: dict[str, Any] = {"case": f"{num_sequences}x{prompt_tokens}", "plain": plain}
        if self._head is not None:
            return figures | self._head_figures(self._head.method, prompts, plain["step_ms"])
        by_ngrams = SpeculativeConfig(method="ngram", num_speculative_tokens=self._max_drafts)
        by_suffixes = SpeculativeConfig(method="suffix", num_speculative_tokens=self._max_drafts)
        searching = SpeculativeConfig(method="ngram_gpu", num_speculative_tokens=self._max_drafts)
        kinds: dict[str, tuple[Proposer, float, DraftMaker | None]] = {
            "oracle": (_Guesses(lambda one: known[one.request_id][one.num_output_tokens :]), 0.0, None),
            "oracle, ahead": (PROPOSERS["ngram_gpu"](searching), 0.0, self._oracle(known)),
            "random": (_Guesses(lambda _: [random.randrange(100, 1000) for _ in range(self._max_drafts)]), 0.0, None),
            "random, paused": (_Guesses(lambda _: [random.randrange(100, 1000)] * self._max_drafts), 1.05, None),
            "ngram, paused": (PROPOSERS["ngram"](by_ngrams), 1.05, None),
            "suffix, paused": (PROPOSERS["suffix"](by_suffixes), 1.05, None),
            "ngram_gpu": (PROPOSERS["ngram_gpu"](searching), 0.0, self._maker),
            "ngram_gpu, paused": (PROPOSERS["ngram_gpu"](searching), 1.05, self._maker),
        }
        wanted = kinds if self._prompt is None else ["ngram, paused", "suffix, paused"]
        for name in wanted:
            proposer, min_gain, maker = kinds[name]
            self._runner.draft_maker = maker
            tokens, figures[name] = self._decode(prompts, proposer, min_gain)
            figures[name]["equal_outputs"] = sum(tokens[one] == known[one] for one in known)
            figures[name]["step_ratio"] = round(figures[name]["step_ms"] / plain["step_ms"], 4)
            figures[name]["tokens_per_s_ratio"] = round(figures[name]["tokens_per_s"] / plain["tokens_per_s"], 4)
        return figures

    def _oracle(self, known: Tokens) -> _KnownDrafts:
        """Return what drafts `known` on the device, beside the inputs that read the drafts of the loaded maker."""
        assert isinstance(self._maker, NgramDrafts), "loaded by main()"
        return _KnownDrafts(known, self._maker.last, self._runner.max_model_len)

    def _head_figures(self, method: str, prompts: list[list[int]], plain_ms: float) -> dict[str, Any]:
        """Return the figures of a random head's drafts, which are all wrong or all right."""
        model = "head" if method == "eagle3" else ""
        config = SpeculativeConfig(method=method, model=model, num_speculative_tokens=self._max_drafts)
        _, wrong = self._decode(prompts, PROPOSERS[method](config), 0.0)
        _, plain_right = self._decode(prompts, None, 0.0, allowed=(0,))
        _, right = self._decode(prompts, PROPOSERS[method](config), 0.0, allowed=(0,))
        wrong["step_ratio"] = round(wrong["step_ms"] / plain_ms, 4)
        right["step_ratio"] = round(right["step_ms"] / plain_right["step_ms"], 4)
        right["tokens_per_s_ratio"] = round(right["tokens_per_s"] / plain_right["tokens_per_s"], 4)
        return {"head, wrong": wrong, "plain, one token allowed": plain_right, "head, right": right}

    def _decode(
        self,
        prompts: list[list[int]],
        proposer: Proposer | None,
        min_gain: float,
        allowed: tuple[int, ...] | None = None,
    ) -> tuple[Tokens, Any]:
        engine = self._engine(len(prompts), proposer, min_gain)
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(
                max_tokens=self._max_tokens,
                seed=number,
                ignore_eos=True,
                temperature=0.0,
                allowed_token_ids=allowed,
            )
            engine.add_request(GenerationRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling))
        tokens: Tokens = {f"r{number}": [] for number in range(len(prompts))}
        ends, counts = [], []  # of the steps in which all sequences decode
        while engine.has_work:
            are_all_running = len(engine.request_ids) == len(prompts)
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    tokens[event.request_id] += event.token_ids
            if are_all_running and all(tokens.values()):
                ends.append(time.perf_counter())
                counts.append(sum(map(len, tokens.values())))
        num_tokens, num_steps = counts[-1] - counts[0], len(ends) - 1
        return tokens, {
            "steps": num_steps,
            "step_ms": round(1e3 * statistics.median(after - before for before, after in pairwise(ends)), 4),
            "tokens_per_step": round(num_tokens / num_steps / len(prompts), 3),
            "tokens_per_s": round(num_tokens / (ends[-1] - ends[0]), 1),
        }

    def _engine(self, num_sequences: int, proposer: Proposer | None, min_gain: float) -> Engine:
        runner, is_ahead = self._runner, self._runner.device_type == "cuda"
        config = SchedulerConfig(
            max_num_seqs=num_sequences, max_num_batched_tokens=_MAX_TOKENS, max_model_len=runner.max_model_len
        )
        kv_cache = KVCacheManager(
            runner.num_blocks, runner.block_size, windows=runner.windows, num_state_blocks=runner.num_state_blocks
        )
        limits = DraftLimits(
            max_drafts=self._max_drafts,
            max_samples=(1 + self._max_drafts) * num_sequences,
            max_tokens=_MAX_TOKENS,
            may_run_ahead=is_ahead and not any(runner.windows),
        )
        gain = DraftGain(min_gain, runs_ahead=is_ahead)
        drafting = Drafting(proposer, kv_cache, limits, gain) if proposer is not None else None
        return Engine(
            Scheduler(config, kv_cache, drafting),
            runner,
            eos_token_ids=(),
            vocab_size=runner.model_spec.vocab_size,
            clock=time.perf_counter,
            async_scheduling=is_ahead,
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench speculation", description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="PATH", type=Path)
    parser.add_argument("--out", metavar="PATH", type=Path, required=True)
    parser.add_argument("--cases", metavar="SEQUENCESxTOKENS,...", default="1x1024,8x1024,32x1024")
    parser.add_argument("--drafts", metavar="N", type=int, default=3)
    parser.add_argument("--tokens", metavar="N", type=int, default=256)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--prompt", metavar="PATH", type=Path, help="text of all prompts (default: random tokens)")
    heads = parser.add_mutually_exclusive_group()
    heads.add_argument("--head", metavar="PATH", type=Path, help="an EAGLE-3 head for the model")
    heads.add_argument("--mtp", action="store_true", help="the model's layer for multi-token prediction")
    options = parser.parse_args(argv)
    cases = [tuple(map(int, case.split("x"))) for case in options.cases.split(",")]
    most = max(sequences for sequences, _ in cases)
    settings = ExecutionSettings(
        model=options.model,
        device=options.device,
        load_format=options.load_format,
        quantization=options.quantization,
        deterministic=options.deterministic,
        swap_space_bytes=0,
        kv_cache_memory_bytes=2**30 if options.device == "cpu" else None,
        max_model_len=max(tokens for _, tokens in cases) + options.tokens,
        max_num_seqs=most * (1 + options.drafts),
        max_num_batched_tokens=_MAX_TOKENS,
    )
    head = None
    if options.mtp or options.head is not None:
        head = DraftHeadFiles("mtp", options.model) if options.mtp else DraftHeadFiles("eagle3", options.head)
    drafts = DraftSettings(num_drafts=options.drafts, head=head, ngram_lengths=(2, 4) if head is None else None)
    runner = load_model_runner(settings, lambda phase, progress, detail: None, drafts=drafts)
    prompt = None
    if options.prompt is not None:
        prompt = Tokenizer.from_file(str(options.model / "tokenizer.json")).encode(options.prompt.read_text()).ids
    bench = Speculation(runner, options.drafts, options.tokens, head, prompt)
    figures = [bench.case(*case) for case in cases]
    for case in figures:
        print(json.dumps(case))
    options.out.write_text(json.dumps({"commit": commit(), "argv": argv, "cases": figures}, indent=1))
    return 0
