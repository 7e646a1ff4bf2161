"""Random requests for the scripted engine, with the text that an undisturbed server gives. Pure."""

import random
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from tests.builders import expected_output, make_prompt, make_request
from tests.faults.stream_client import Answer

MAX_NUM_TOKENS = 2048


@dataclass(frozen=True)
class MixedRequest:
    kind: str
    body: dict[str, Any]
    texts: list[str]
    finish_reason: str

    def difference(self, answer: Answer) -> str:
        """Return how the answer differs from the expected one; empty if it is equal and came once."""
        if answer.texts != self.texts:
            return f"{self.kind} {self.body}: text {answer.texts}, expected {self.texts}"
        if answer.finish_reasons != [self.finish_reason] * len(self.texts) or answer.num_ends != 1:
            return f"{self.kind} {self.body}: ends {answer.finish_reasons}, {answer.num_ends} times"
        return ""

    def violations(self, answer: Answer) -> list[str]:
        """Return errors that no fault excuses, also in an incomplete answer: a wrong text, or several ends."""
        wrong = [text for text, expected in zip(answer.texts, self.texts, strict=True) if not expected.startswith(text)]
        found = [f"{self.kind} {self.body}: text {text!r}, expected {self.texts}" for text in wrong]
        return found + ([f"{self.kind} {self.body}: {answer.num_ends} ends"] if answer.num_ends > 1 else [])


class RequestMix:
    def __init__(self, source: random.Random, tokenizer: Tokenizer, model: str, *, max_tokens: int) -> None:
        self._random = source
        self._tokenizer = tokenizer
        self._model = model
        self._max_tokens = max_tokens

    def draw(self) -> MixedRequest:
        kind = self._random.choice(["greedy", "seeded", "n", "stop"])
        prompt = make_prompt(self._random.randint(2, 60), first=self._random.randrange(900))
        max_tokens = self._random.randint(self._max_tokens // 4, self._max_tokens)
        num_choices, seed = (3 if kind == "n" else 1), self._random.getrandbits(31)
        temperature = 0.0 if kind in ("greedy", "stop") else 1.0
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": temperature}
        body |= {"seed": seed, "n": num_choices, "ignore_eos": True}
        sampling: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": True,
        }
        request = make_request(prompt, n=num_choices, **sampling)
        outputs = [
            expected_output(request, max_num_tokens=MAX_NUM_TOKENS, choice=choice) for choice in range(num_choices)
        ]
        texts = [self._tokenizer.decode(output) for output in outputs]
        if kind != "stop":
            return MixedRequest(kind, body, texts, "length")
        (text,) = texts
        start = self._random.randint(len(text) // 2, len(text) - 4)
        stop = text[start : start + 3]
        if "\ufffd" in stop:  # random bytes are invalid UTF-8, whose division into pieces is not promised
            return MixedRequest("greedy", body, texts, "length")
        return MixedRequest(kind, {**body, "stop": stop}, [text[: text.find(stop)]], "stop")
