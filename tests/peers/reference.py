"""Log-likelihoods and greedy texts by `transformers` in float32, with which lm-eval's are compared."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from tests.engine_worker.execution.reference import Reference


class ReferenceModel:
    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)  # two threads that spin for each other are slow beside a server
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._model = Reference(directory)

    def log_likelihood(self, context: str, text: str) -> tuple[float, bool]:
        """Return the log-likelihood of `text` after `context`, and whether each of its tokens is the likeliest."""
        before, whole = self._encode(context), self._encode(context + text)
        return self._score(whole, len(before))

    def rolling_log_likelihood(self, first: str, text: str) -> float:
        """Return the log-likelihood of all of `text` after the special token `first`."""
        begin = self._tokenizer.token_to_id(first)
        assert begin is not None, first
        return self._score([begin, *self._encode(text)], 1)[0]

    def generate_until(self, prompt: str, stops: list[str], max_tokens: int, end: str) -> str:
        token_ids, prompt_length = self._encode(prompt), len(self._encode(prompt))
        text = ""
        for _ in range(max_tokens):
            token_ids.append(int(self._model.logits(token_ids, 1).argmax()))
            if token_ids[-1] == self._tokenizer.token_to_id(end):
                break
            text = self._tokenizer.decode(token_ids[prompt_length:])
            places = [text.index(stop) for stop in stops if stop in text]
            if places:
                return text[: min(places)]
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _score(self, token_ids: list[int], num_context: int) -> tuple[float, bool]:
        exact = self._model.logits(token_ids, len(token_ids)).log_softmax(-1)[num_context - 1 : -1]
        scored = torch.tensor(token_ids[num_context:])
        is_greedy = bool((exact.argmax(-1) == scored).all())
        return float(exact.gather(1, scored[:, None]).sum()), is_greedy
