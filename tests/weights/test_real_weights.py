"""Qwen2.5-Coder-0.5B-Instruct out of a GGUF file gives the tokens of transformers; Gemma 3 is refused by its name."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_worker.convert_gguf import main
from gateway.text.served_model import load_served_model
from tests.builders import make_request
from tests.engine_worker.execution.reference import generate, make_runner

pytestmark = [pytest.mark.weights, pytest.mark.timeout(1800)]

TEXTS = (
    "def quicksort(items):\n",
    "The three laws of thermodynamics are",
    "import asyncio\n\nasync def main():\n    async with",
    "SELECT name, count(*) FROM orders",
    "一个简单的例子：",
    "Dear customer,\nthank you for your order of",
)
TOKENS = 32


def test_tokens_are_the_likeliest_of_transformers(qwen_dir: Path) -> None:
    """In float32, token after token on the same prefix. Rounding alone decides between two that are as likely."""
    encoder = load_served_model(qwen_dir).encoder
    prompts = {f"p{number}": encoder.encode_text(text) for number, text in enumerate(TEXTS)}
    runner = make_runner(qwen_dir, num_blocks=64)
    requests = [make_request(ids, name, max_tokens=TOKENS, ignore_eos=True) for name, ids in prompts.items()]
    outputs, _ = generate(runner, requests, max_num_seqs=8, max_num_batched_tokens=64)
    model = AutoModelForCausalLM.from_pretrained(qwen_dir, dtype=torch.float32)
    agreed = 0
    for name, ids in prompts.items():
        with torch.inference_mode():
            logits = model(torch.tensor([ids + outputs[name][:-1]]), logits_to_keep=TOKENS).logits[0]
        agreed += int((logits.argmax(-1) == torch.tensor(outputs[name])).sum())
    assert agreed >= 0.98 * TOKENS * len(TEXTS), agreed


def test_a_family_that_is_not_read_is_refused_by_name(
    gemma_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(gemma_gguf), str(tmp_path / "model")]) == 1
    assert "architecture 'gemma3' is not read from GGUF; these are: llama" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
