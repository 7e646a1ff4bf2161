"""Check structured outputs against their schemas, and measure the cost of masks per step.

    python -m bench structured MODEL_DIR --out FILE [--suite jsonschema-4.26.0.tar.gz] [--schemas 200] [--device cuda]

It answers schemas of schema_corpus.py at temperature 1 and validates each complete output with `jsonschema`. Schemas
with unsupported keywords are refused as by the gateway, and counted. Outputs cut by max_tokens are repeated for several
rounds with a bias for tokens that end strings, lists and objects. Masks are measured on the host (matchers advanced,
masks filled) and on the device (mask applied), over `--batch` sequences of different schemas. The exit status is 1 if
an output is invalid, a request failed, or an output was cut in every round.
"""

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from bench.engine.schema_corpus import kubernetes, test_suite
from bench.engine.session import step_figures
from bench.provenance import commit
from engine_worker.engine import Engine
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.sampling.grammar_compiler import GrammarCompiler
from engine_worker.execution.sampling.grammar_masks import GrammarMasks
from engine_worker.execution.sampling.sampled_sequence import SampledSequence
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.sequence import Sequence
from engine_worker.model.architectures import spec_from_directory
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig
from kernels.token_bitmask import apply_token_bitmask
from shared.grammars import GrammarError, check_grammar, json_schema_grammar
from shared.messages import ErrorEvent, FinishEvent, FinishReason, GenerationRequest, SamplingParams, TokenEvent

MAX_SEQS, MAX_TOKENS, MAX_MODEL_LEN = 32, 1024, 4096
PROMPT_CHARS = 400  # of the schema, to leave room for the output
_NUMBERS = re.compile(r"[\d.]+")
_SPACE = "\u0120\u010a"  # space and newline in a byte-level vocabulary
_ENDS = '"]}' + _SPACE
_BIAS_OF_A_ROUND, _MAX_BIAS = 3.0, 6.0
_UNSTEADY_STEPS = 8  # their masks are the first of new matchers


@dataclass(slots=True)
class Answers:
    valid: int = 0
    cut: list[str] = field(default_factory=list)  # by max_tokens
    invalid: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    tokens: int = 0


def followable(schemas: dict[str, Any]) -> tuple[dict[str, Any], Counter[str]]:
    """Return the schemas that the gateway accepts, and why it refuses the others."""
    taken, refused = {}, Counter[str]()
    for name, schema in schemas.items():
        try:
            check_grammar(json_schema_grammar(schema))
            taken[name] = schema
        except GrammarError as error:
            refused[_NUMBERS.sub("N", str(error).split(":")[0])[:60]] += 1
    return taken, refused


def spread(schemas: dict[str, Any], number: int) -> dict[str, Any]:
    """Select `number` schemas evenly."""
    names = sorted(schemas)
    return {name: schemas[name] for name in names[:: max(1, len(names) // number)][:number]}


def answer(
    engine: Engine, tokenizer: Tokenizer, schemas: dict[str, Any], prompt_of: Callable[[Any], str], **fields: Any
) -> Answers:
    """Generate an output for each schema; `fields` are SamplingParams of all requests."""
    answers, outputs = Answers(), {name: list[int]() for name in schemas}
    for number, (name, schema) in enumerate(schemas.items()):
        sampling = SamplingParams(seed=number, grammar=json_schema_grammar(schema), **fields)
        prompt = tokenizer.encode(prompt_of(schema), add_special_tokens=False).ids
        engine.add_request(GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work:
        for event in engine.step():
            match event:
                case TokenEvent():
                    outputs[event.request_id] += event.token_ids
                case ErrorEvent():
                    answers.failed.append(f"{event.request_id}: {event.message}")
                case FinishEvent(reason=FinishReason.STOP):
                    _judge(answers, event.request_id, schemas, tokenizer.decode(outputs[event.request_id]))
                case _:
                    answers.cut.append(event.request_id)
    answers.tokens = sum(map(len, outputs.values()))
    return answers


def _judge(answers: Answers, name: str, schemas: dict[str, Any], text: str) -> None:
    import jsonschema  # noqa: PLC0415 - not needed with --masks-only

    kind = jsonschema.validators.validator_for(schemas[name], default=jsonschema.Draft202012Validator)
    try:
        kind(schemas[name]).validate(json.loads(text))
        answers.valid += 1
    except (jsonschema.ValidationError, ValueError) as error:
        answers.invalid.append(f"{name}: {text[:200]}: {str(error).splitlines()[0]}")


def mask_cost(model: Path, schemas: dict[str, Any], batch: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Measure masks over `steps` steps of `batch` sequences that generate random allowed tokens."""
    config = spec_from_directory(model)
    compiler = GrammarCompiler(model, config.vocab_size, config.eos_token_ids)
    masks = GrammarMasks(compiler, config.vocab_size, device)
    grammars = [json_schema_grammar(schema) for schema in list(schemas.values())]
    started = time.perf_counter()
    compiler.compile(grammars[0])
    tokenizer_seconds, started = time.perf_counter() - started, time.perf_counter()
    for grammar in grammars[1:]:
        compiler.compile(grammar)
    compile_seconds = (time.perf_counter() - started) / (len(grammars) - 1)
    logits = torch.randn(batch, config.vocab_size, device=device).bfloat16()
    sequences: list[SampledSequence] = [_sequence(grammars[row % len(grammars)]) for row in range(batch)]
    host, host_cpu, applied = [], [], []
    for step in range(steps):
        started, cpu_started = time.perf_counter(), time.process_time()
        masks.keep_only(sequences)
        found, problems = masks.of(sequences, [sequence.num_output_tokens for sequence in sequences], dict)
        host.append(time.perf_counter() - started)
        host_cpu.append(time.process_time() - cpu_started)
        assert found is not None and not problems, problems
        scores = logits.clone()
        applied.append(_applied(scores, found.rows, found.masks))
        chosen = torch.multinomial(scores.float().softmax(-1), 1)[:, 0].tolist()
        for row, token_id in enumerate(chosen):
            sequences[row].output_token_ids.append(token_id)
            if token_id in config.eos_token_ids:
                sequences[row] = _sequence(grammars[(step + row) % len(grammars)])
    return {
        "batch": batch,
        "vocab_size": config.vocab_size,
        "tokenizer_and_first_grammar_seconds": round(tokenizer_seconds, 3),
        "compile_ms": round(1e3 * compile_seconds, 3),
        "host": step_figures(host[_UNSTEADY_STEPS:]),
        "host_cpu": step_figures(host_cpu[_UNSTEADY_STEPS:]),  # of all threads
        "apply": step_figures(applied[_UNSTEADY_STEPS:]),
    }


def _applied(scores: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> float:
    """Apply the mask and return seconds, on the device's clock if it has one."""
    if not scores.is_cuda:
        started = time.perf_counter()
        apply_token_bitmask(scores, rows, masks)
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
    begin.record()
    apply_token_bitmask(scores, rows, masks)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _sequence(grammar: Any) -> Sequence:
    return Sequence("bench", [0], SamplingParams(max_tokens=1, seed=0, grammar=grammar))


def _engine(runner: ModelRunner) -> Engine:
    config = SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=512, max_model_len=MAX_MODEL_LEN)
    return Engine(
        Scheduler(config, KVCacheManager(runner.num_blocks, runner.block_size)),
        runner,
        eos_token_ids=runner.model_spec.eos_token_ids,
        vocab_size=runner.model_spec.vocab_size,
        clock=time.perf_counter,
        async_scheduling=runner.device_type == "cuda",
    )


def _prompt(schema: Any) -> str:
    task = f"Answer with a short JSON example of this schema, nothing else:\n{json.dumps(schema)[:PROMPT_CHARS]}"
    return f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n"


def _ends(tokenizer: Tokenizer, bias: float) -> dict[int, float]:
    """Return a bias for ending tokens: a small model at temperature 1 rarely ends a list by itself."""
    vocabulary = tokenizer.get_vocab()
    return {token_id: bias for token, token_id in vocabulary.items() if token.strip(_SPACE) and not token.strip(_ENDS)}


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    everything = ({} if options.no_kubernetes else kubernetes()) | (test_suite(options.suite) if options.suite else {})
    taken, refused = followable(everything)
    chosen = spread(taken, options.schemas)
    result: dict[str, Any] = {"commit": commit(), "device": options.device, "torch": torch.__version__}
    result["corpus"] = {"schemas": len(everything), "followed": len(taken), "refused": dict(refused.most_common())}
    result["masks"] = mask_cost(options.model, chosen, options.batch, options.steps, torch.device(options.device))
    is_good = True
    if not options.masks_only:
        settings = ExecutionSettings(
            model=options.model,
            device=options.device,
            kv_cache_memory_bytes=2**31,
            swap_space_bytes=0,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=512,
        )
        runner = load_model_runner(settings, lambda phase, progress, detail: None)
        started = time.perf_counter()
        tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        part = dict(list(chosen.items())[options.part :: options.parts])
        rounds: list[Any] = []
        while part and len(rounds) < options.rounds:
            bias = min(_BIAS_OF_A_ROUND * len(rounds), _MAX_BIAS)
            ends = _ends(tokenizer, bias) if bias else {}
            answers = answer(_engine(runner), tokenizer, part, _prompt, max_tokens=options.max_tokens, logit_bias=ends)
            rounds.append({"schemas": len(part), "end_bias": bias, **asdict(answers)})
            part = {name: part[name] for name in answers.cut}
        result["answers"] = {
            "valid": sum(found["valid"] for found in rounds),
            "max_tokens": options.max_tokens,
            "rounds": rounds,
            "seconds": round(time.perf_counter() - started, 1),
        }
        is_good = not part and not any(found["invalid"] or found["failed"] for found in rounds)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if is_good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench structured", description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="PATH", type=Path)
    parser.add_argument("--out", metavar="PATH", type=Path, required=True)
    parser.add_argument("--suite", metavar="PATH", type=Path, help="source distribution of the package jsonschema")
    parser.add_argument("--no-kubernetes", action="store_true", help="use only the suite")
    parser.add_argument("--schemas", metavar="N", type=int, default=200)
    parser.add_argument("--parts", metavar="N", type=int, default=1, help="answer every Nth schema")
    parser.add_argument("--part", metavar="N", type=int, default=0, help="index of the first schema of a part")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=MAX_TOKENS)
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        default=6,
        help="rounds; later ones repeat outputs that were cut (default: %(default)s)",
    )
    parser.add_argument("--batch", metavar="N", type=int, default=32)
    parser.add_argument("--steps", metavar="N", type=int, default=400)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--masks-only", action="store_true", help="measure only masks, with config.json and tokenizer.json"
    )
    return parser
