"""lm-eval's `local-completions`: perplexity of texts, multiple choice, and generation until a stop string.

Its tasks are in lm_eval_tasks/ with our own texts, because no data set can be downloaded. Every log-probability and
every
text is compared with transformers.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

from tests.peers.peer import Environment, PeerFailed, Report, Served, expect, lines_from
from tests.peers.reference import ReferenceModel

PACKAGE = "lm_eval"
TASKS = Path(__file__).parent / "lm_eval_tasks"
TOLERANCE = 0.005  # relative difference of a perplexity; 1e-5 is observed
STOPS, MAX_TOKENS = [".", ",", "\n"], 24  # from generate.yaml


def run(served: Served, environment: Environment) -> Report:
    shutil.copytree(TASKS, environment.folder, dirs_exist_ok=True)
    model = f"model={served.name},base_url={served.url}/v1/completions,tokenizer={served.model},num_concurrent=2"
    arguments = ["--model", "local-completions", "--model_args", model, "--batch_size", "4", "--include_path", "."]
    arguments += ["--tasks", "text", "choices", "generate", "--output_path", "out", "--log_samples"]
    output = environment.run("lm-eval", "run", *arguments)
    reference = ReferenceModel(served.model)
    ours, exact = _perplexities(_samples(environment, "text"), reference)
    worst = _largest_difference(_samples(environment, "choices"), reference)
    num_texts = _compare_texts(_samples(environment, "generate"), reference)
    summary = (
        f"word perplexity {ours:.4f}, transformers {exact:.4f} ({abs(ours / exact - 1):.1e}); choices within "
        f"{worst:.1e} of its log-probabilities; {num_texts} generated texts are its greedy ones"
    )
    return Report(summary, lines_from(output, "|Version|"))


def _samples(environment: Environment, task: str) -> list[dict[str, Any]]:
    (file,) = environment.folder.glob(f"out/*/samples_{task}_*.jsonl")
    return sorted((json.loads(line) for line in file.open()), key=lambda sample: sample["doc_id"])


def _perplexities(samples: list[dict[str, Any]], reference: ReferenceModel) -> tuple[float, float]:
    """Return the word perplexity of all texts: as lm-eval reports it, and by transformers."""
    words = sum(sample["word_perplexity"][1] for sample in samples)
    reported = sum(sample["word_perplexity"][0] for sample in samples)
    # lm-eval adds the tokenizer's first token before a text.
    known = sum(reference.rolling_log_likelihood("<|im_start|>", sample["doc"]["text"]) for sample in samples)
    ours, exact = math.exp(-reported / words), math.exp(-known / words)
    if abs(ours / exact - 1) > TOLERANCE:
        raise PeerFailed(f"perplexity {ours}, but transformers has {exact}")
    return ours, exact


def _largest_difference(samples: list[dict[str, Any]], reference: ReferenceModel) -> float:
    worst = 0.0
    for sample in samples:
        for choice, ((reported, is_greedy),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            known, known_greedy = reference.log_likelihood(sample["doc"]["question"], f" {choice}")
            worst = max(worst, abs(float(reported) - known))
            expect(f"the likeliest token, {choice!r}", is_greedy == "True", known_greedy)
            if abs(float(reported) / known - 1) > TOLERANCE:
                raise PeerFailed(f"log-probability of {choice!r}: {reported}, but transformers has {known}")
    return worst


def _compare_texts(samples: list[dict[str, Any]], reference: ReferenceModel) -> int:
    for sample in samples:
        question = sample["doc"]["question"]
        known = reference.generate_until(question, STOPS, MAX_TOKENS, "<|im_end|>")
        expect(f"the text behind {question!r}", sample["resps"][0][0], known)
    return len(samples)
