"""Run lm-eval's word perplexity for one model with the Python of `.venv/peers/quality`.

    python lm_eval_peer.py OUT local-completions base_url=...,model=...,tokenizer=DIR,max_length=2048
    python lm_eval_peer.py OUT hf pretrained=DIR,dtype=bfloat16,softmax_dtype=float32,max_length=2046

The task `articles` is in the current directory. OUT is JSON with the perplexity, the scored windows (tokens without the
last), and the top token after each. It imports nothing of this repository.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

TASK = "articles"
PACKAGES = ("lm_eval", "transformers", "torch", "datasets")


class Served(LocalCompletionsAPI):
    """An OpenAI completions server that is sent token ids instead of text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.windows: list[dict[str, Any]] = []

    def _create_payload(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        return {**super()._create_payload(*arguments, **options), "return_tokens_as_token_ids": True}

    def parse_logprobs(self, outputs: Any, tokens: list[list[int]], ctxlens: list[int], **options: Any) -> Any:
        answers = outputs if isinstance(outputs, list) else [outputs]
        choices = [one for answer in answers for one in sorted(answer["choices"], key=lambda one: one["index"])]
        for window, choice in zip(tokens, choices, strict=True):
            logprobs = choice["logprobs"]
            likeliest = [_likeliest(top) for top in logprobs["top_logprobs"][1 : len(window)]]
            scores = logprobs["token_logprobs"][1 : len(window)]
            self.windows.append({"token_ids": window[:-1], "likeliest": likeliest, "log_probabilities": scores})
        return LocalCompletionsAPI.parse_logprobs(outputs=outputs, tokens=tokens, ctxlens=ctxlens)


class Loaded(HFLM):
    """transformers in this process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.windows: list[dict[str, Any]] = []

    def _model_call(self, inps: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        logits: torch.Tensor = super()._model_call(inps, *arguments, **options)
        for row, row_logits in zip(inps, logits, strict=True):
            scores = row_logits[:-1].log_softmax(-1, dtype=torch.float32).gather(1, row[1:, None])[:, 0]
            likeliest = row_logits.argmax(-1)
            window = {"token_ids": row, "likeliest": likeliest, "log_probabilities": scores}
            self.windows.append({name: values.tolist() for name, values in window.items()})
        return logits


def _likeliest(top: dict[str, float]) -> int:
    return int(max(top, key=lambda name: top[name]).removeprefix("token_id:"))


def main() -> None:
    out, kind, arguments = sys.argv[1:]
    kinds: dict[str, Any] = {"local-completions": Served, "hf": Loaded}
    model = kinds[kind].create_from_arg_string(arguments, {"batch_size": 1})
    tasks = TaskManager(include_path=".", include_defaults=False)
    evaluated = lm_eval.simple_evaluate(model, tasks=[TASK], task_manager=tasks, bootstrap_iters=0)
    scores = [sample["word_perplexity"] for sample in evaluated["samples"][TASK]]
    result = {
        "word_perplexity": evaluated["results"][TASK]["word_perplexity,none"],
        "words": sum(words for _, words in scores),
        "versions": {name: version(name) for name in PACKAGES},
        "windows": model.windows,
    }
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
