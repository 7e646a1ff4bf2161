"""llama.cpp beside our engine: its own server in a process, from PyPI's `xllamacpp` in `.venv/peers/llama-cpp`.

The file is served as it is and as a twin in BF16, which is made once and kept. Requests go over HTTP, whole answers
each, which costs a thousandth of what they compute. Nothing is kept of an earlier prompt, as on every side.
"""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from bench.engine.peer_process import peer_process
from bench.engine.side import NoPeer, Run, run_peer
from pagestream.directories import cache_directory

ENVIRONMENT = Path(sys.prefix) / "peers" / "llama-cpp"
_PEER = Path(__file__).with_name("llama_cpp_peer.py")
_ANSWER_SECONDS = 1800.0  # 32 prompts on a machine that others use
_MORE_CELLS = 8  # a slot ends a text a little before its last cell


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    url: str
    versions: dict[str, str]

    def __call__(self, prompts: list[list[int]], output_tokens: int) -> Run:
        return run_peer(self._timed, prompts, output_tokens)

    def _timed(self, prompts: list[list[int]], output_tokens: int) -> tuple[float, list[list[int]]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            started = time.perf_counter()
            outputs = list(pool.map(lambda prompt: self._completion(prompt, output_tokens), prompts))
            return time.perf_counter() - started, outputs

    def _completion(self, prompt: list[int], output_tokens: int) -> list[int]:
        body = {
            "prompt": prompt, "n_predict": output_tokens, "ignore_eos": True, "cache_prompt": False,
            "samplers": ["top_k"], "top_k": 1, "return_tokens": True,
        }  # fmt: skip
        request = Request(f"{self.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=_ANSWER_SECONDS) as response:
            answer: dict[str, Any] = json.load(response)
        if answer["truncated"] or len(answer["tokens"]) != output_tokens:
            raise NoPeer(f"llama.cpp wrote {len(answer['tokens'])} tokens of {output_tokens}")
        return list(answer["tokens"])


@contextmanager
def llama_cpp(file: Path, *, is_bf16: bool, threads: int, slots: int, slot_tokens: int) -> Iterator[LlamaCpp]:
    """A server of `file` until the end of the block. Raises NoPeer."""
    arguments = [str(file), "--threads", str(threads), "--slots", str(slots)]
    arguments += ["--slot-tokens", str(slot_tokens + _MORE_CELLS)]
    if is_bf16:
        twin = cache_directory() / "peers" / f"{file.stem}.BF16.gguf"
        twin.parent.mkdir(parents=True, exist_ok=True)
        arguments += ["--bf16", str(twin)]
    with peer_process("llama.cpp", file, ENVIRONMENT, _PEER, arguments) as peer:
        yield LlamaCpp(**peer.told("url"))
