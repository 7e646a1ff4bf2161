"""Record how certain a language model is of its next tokens: python3 -m bench.paper.record_next_tokens OUT.json.

SmolLM2-135M-Instruct answers instructions at temperature 1. The log-probabilities of the most likely tokens are kept
for each position. Figures 14 and 15 draw from them, because only these decide how often beams share a parent.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

NUM_TOP = 12  # beam search of width 6 uses 12 continuations in all
OUTPUT_TOKENS = 64
INSTRUCTIONS = (
    "Give three tips for staying healthy.",
    "What are the three primary colors?",
    "Describe the structure of an atom.",
    "How can we reduce air pollution?",
    "Write a short story about a boy who found a key.",
    "Rewrite the sentence in the past tense: She walks to the park.",
    "Name the capital of France and say what it is known for.",
    "Explain why the sky is blue to a child.",
    "Generate a list of ten items a person might need for a camping trip.",
    "Summarize the main causes of the First World War.",
    "Write a polite email that declines an invitation.",
    "Classify as fruit or vegetable: carrot, apple, spinach, pear.",
)


def main(argv: list[str]) -> int:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - a development dependency

    parser = argparse.ArgumentParser(prog="python3 -m bench.paper.record_next_tokens")
    parser.add_argument("--model", metavar="PATH", type=Path, required=True)
    parser.add_argument("output", metavar="PATH", type=Path)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    rows: list[list[float]] = []
    for instruction in INSTRUCTIONS:
        text = f"<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer(text, return_tensors="pt")
        output = model.generate(
            **prompt,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=OUTPUT_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for logits in output.logits:
            rows.append([round(value, 2) for value in logits[0].log_softmax(-1).topk(NUM_TOP).values.tolist()])
    options.output.write_text(
        json.dumps({"model": "SmolLM2-135M-Instruct", "rows": rows}, separators=(",", ":")) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
