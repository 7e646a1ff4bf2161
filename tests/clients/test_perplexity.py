"""Evaluations with the requests of lm-eval's local-completions read the logprobs of transformers."""

import math
from pathlib import Path

import openai
import pytest
from tokenizers import Tokenizer

from tests.clients.conftest import Served
from tests.e2e.fleet import MODEL
from tests.engine_worker.execution.reference import Reference

pytestmark = pytest.mark.timeout(400)

TEXT = (
    "The lighthouse stood on a rock that the sea had not yet taken. Every evening its keeper climbed one hundred and "
    "forty steps, trimmed the wick and watched the ships go by, and every morning he wrote their number in a book. "
    "When the winter came, the book was full of storms, and the number of the ships was small. He did not mind: the "
    "gulls were company enough, and a letter came with the first boat of spring."
)


def test_perplexity_of_a_text_equals_transformers(served: Served, demo_model_dir: Path) -> None:
    token_ids = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    context = token_ids[:20]
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model=MODEL, prompt=[token_ids, context], temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
        )
    exact = Reference(demo_model_dir).logits(token_ids, len(token_ids)).log_softmax(-1)
    expected = [float(exact[place, token_id]) for place, token_id in enumerate(token_ids[1:])]
    for choice, num_tokens in zip(answer.choices, (len(token_ids), len(context)), strict=True):
        assert choice.logprobs is not None
        # without the first token, which has none, and the generated one
        scores = (choice.logprobs.token_logprobs or [])[1:-1]
        assert len(scores) == num_tokens - 1
        # fp32 on both sides with another order of sums; the limit is 0.5 %, the measured difference 0.001 %.
        assert scores == pytest.approx(expected[: num_tokens - 1], abs=2e-3)
        perplexity = math.exp(-sum(scores) / len(scores))
        assert perplexity == pytest.approx(math.exp(-sum(expected[: len(scores)]) / len(scores)), rel=5e-4)
