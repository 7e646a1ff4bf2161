"""llama.cpp beside our engine: its own server in a process, from PyPI's `xllamacpp` in `.venv/peers/llama-cpp`.

The file is served as it is and as a twin in BF16, which is made once and kept. Requests go over HTTP, whole answers
each, which costs a thousandth of what they compute. Nothing is kept of an earlier prompt, as on every side.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from bench.engine.side import Run
from pagestream.directories import cache_directory

ENVIRONMENT = Path(sys.prefix) / "peers" / "llama-cpp"
_PEER = Path(__file__).with_name("llama_cpp_peer.py")
_ANSWER_SECONDS = 1800.0  # 32 prompts on a machine that others use
_MORE_CELLS = 8  # a slot ends a text a little before its last cell


class NoPeer(RuntimeError):
    """llama.cpp cannot be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    url: str
    versions: dict[str, str]

    def __call__(self, prompts: list[list[int]], output_tokens: int) -> Run:
        """The prefill is timed by a run of its own with one output token."""
        to_first, outputs = self._timed(prompts, 1)
        if output_tokens == 1:
            return Run(to_first, to_first, 0, outputs)
        seconds, outputs = self._timed(prompts, output_tokens)
        return Run(min(to_first, seconds), seconds, sum(len(output) - 1 for output in outputs), outputs)

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
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        raise NoPeer(f"{ENVIRONMENT} is not there: make peers, or make {ENVIRONMENT}/.installed alone")
    command = [str(python), str(_PEER), str(file), "--threads", str(threads), "--slots", str(slots)]
    command += ["--slot-tokens", str(slot_tokens + _MORE_CELLS)]
    if is_bf16:
        twin = cache_directory() / "peers" / f"{file.stem}.BF16.gguf"
        twin.parent.mkdir(parents=True, exist_ok=True)
        command += ["--bf16", str(twin)]
    # What it logs goes to our standard error: it is told apart from what is measured, and seen if it fails.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            told = next((line for line in process.stdout if line.startswith('{"url"')), None)
            if told is None:
                raise NoPeer(f"llama.cpp ended with {process.wait()} before it served {file}")
            yield LlamaCpp(**json.loads(told))
        finally:
            process.stdin.close()
