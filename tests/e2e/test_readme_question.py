"""The README's question over HTTP, in the default number format and with weights of 4 and 8 bits.

The answer is the same streamed or not, cached or not.
"""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bench.serving.own_server import OwnServer, own_server
from kernels.cpu.build import NoLibrary
from kernels.cpu.linear import linear_kernels
from tests.patience import PATIENCE_SECONDS

MODEL = "demo"
ANSWER = "The capital of France is Paris."
FLAGS = ["--kv-cache-memory-bytes", "256M", "--num-threads", "1", "--max-model-len", "1K"]

pytestmark = pytest.mark.timeout(600)


def has_library() -> bool:
    try:
        return bool(linear_kernels())
    except NoLibrary:
        return False


def asked(server: OwnServer, salt: str, stream: bool) -> tuple[str, int]:
    """Return the answer and the number of cached prompt tokens; only prompts with the same `salt` share prefixes."""
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0,
        "max_tokens": 24, "cache_salt": salt, "stream": stream,
    } | ({"stream_options": {"include_usage": True}} if stream else {})  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        if not stream:
            whole = json.load(response)
            return whole["choices"][0]["message"]["content"], cached_tokens(whole)
        lines = [line.removeprefix(b"data: ") for line in response if line.startswith(b"data: {")]
    chunks = [json.loads(line) for line in lines]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return text, cached_tokens(chunks[-1])


def cached_tokens(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


needs_library = pytest.mark.skipif(not has_library(), reason="no C++ kernels here: `python -m kernels.cpu` says why")


def check_answers(server: OwnServer) -> None:
    for stream in (False, True):
        salt = f"stream {stream}"
        for is_cached in (False, True):
            text, cached = asked(server, salt, stream)
            assert (text, cached > 0) == (ANSWER, is_cached)


@needs_library
@pytest.mark.parametrize("quantization", ["as-stored", "int8"])
def test_quantized_weights_give_the_readme_answer(demo_model_dir: Path, quantization: str) -> None:
    flags = [*FLAGS, "--quantization", quantization]
    with own_server(demo_model_dir, MODEL, flags) as server:
        check_answers(server)


def test_default_format_gives_the_readme_answer(demo_model_dir: Path) -> None:
    with own_server(demo_model_dir, MODEL, FLAGS) as server:
        check_answers(server)
