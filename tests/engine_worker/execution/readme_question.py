"""python -m tests.engine_worker.execution.readme_question MODEL DTYPE...: ask README's question greedily, twice.

Prints JSON by dtype: both answers and the cached prompt tokens of the second request. It is a separate program because
oneDNN reads ONEDNN_MAX_CPU_ISA when a process starts.
"""

import json
import sys
from pathlib import Path
from typing import Any

from engine_worker.execution.step.model_runner import ModelRunner
from engine_worker.model.architectures import spec_from_directory
from gateway.text.chat_template import ChatMessage
from gateway.text.served_model import load_served_model
from shared.messages import FinishEvent
from tests.builders import make_request
from tests.engine_worker.execution.reference import make_engine, make_runner, run_engine_to_end

QUESTION = "What is the capital of France?"


def ask(directory: Path, dtype: str) -> dict[str, Any]:
    return answers_of(make_runner(directory, num_blocks=16, block_size=16, dtype=dtype), directory)


def answers_of(runner: ModelRunner, directory: Path) -> dict[str, Any]:
    """Return `answers` and the second request's `cached_tokens`. `directory` is the runner's model."""
    encoder = load_served_model(directory).encoder
    question: list[ChatMessage] = [{"role": "user", "content": QUESTION}]
    prompt = encoder.encode_chat(question, add_generation_prompt=True, continue_final_message=False)
    eos_token_ids = spec_from_directory(directory).eos_token_ids
    engine = make_engine(runner, max_num_seqs=2, max_num_batched_tokens=64)
    answers, cached = [], 0
    for name in ("first", "again"):
        request = make_request(prompt, name, max_tokens=16, stop_token_ids=tuple(eos_token_ids))
        transcript = run_engine_to_end(engine, [request])
        (end,) = transcript.ends.values()
        assert isinstance(end, FinishEvent)
        cached = end.usage.cached_tokens
        answer = [token_id for token_id in transcript.tokens[name] if token_id not in eos_token_ids]
        answers.append(encoder.decode(answer))
    return {"answers": answers, "cached_tokens": cached}


def main() -> None:
    directory, *dtypes = sys.argv[1:]
    print(json.dumps({dtype: ask(Path(directory), dtype) for dtype in dtypes}))


if __name__ == "__main__":
    main()
