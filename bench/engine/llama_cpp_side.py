"""llama.cpp as a peer: its own server in a process, from PyPI's `xllamacpp` in `.venv/peers/llama-cpp`.

The file is served unchanged and as a BF16 twin that is created once. Requests go over HTTP without streaming, which
costs a thousandth of the computation. Prompt caches are off, as for every peer.
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
_ANSWER_SECONDS = 1800.0  # 32 prompts on a shared machine
_MORE_CELLS = 8  # a slot stops shortly before its last cell


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
            raise NoPeer(f"llama.cpp generated {len(answer['tokens'])} of {output_tokens} tokens")
        return list(answer["tokens"])


@contextmanager
def llama_cpp(file: Path, *, is_bf16: bool, threads: int, slots: int, slot_tokens: int) -> Iterator[LlamaCpp]:
    """Yield a running server of `file`.

    Raises:
        NoPeer: If it does not start.
    """
    arguments = [str(file), "--threads", str(threads), "--slots", str(slots)]
    arguments += ["--slot-tokens", str(slot_tokens + _MORE_CELLS)]
    if is_bf16:
        twin = cache_directory() / "peers" / f"{file.stem}.BF16.gguf"
        twin.parent.mkdir(parents=True, exist_ok=True)
        arguments += ["--bf16", str(twin)]
    with peer_process("llama.cpp", file, ENVIRONMENT, _PEER, arguments) as peer:
        yield LlamaCpp(**peer.message("url"))
