"""Clients that are too heavy for the suite, each once with a `pagestream serve` of SmolLM2 on the CPU.

    python -m tests.peers                      all of them, as `make peers`; exits with 1 if one fails
    python -m tests.peers lm-eval aiperf       these
    python -m tests.peers --keep FOLDER        also writes their output, one file each

Each has its own environment, `.venv/peers/NAME` (`make peers` installs them). Their times are no measurements: float32,
one thread, on the same cores as the client.
"""

import argparse
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from bench.serving.own_server import own_server
from pagestream.demo_model import DEMO_MODEL_NAME, ensure_demo_model
from tests.peers import agents, aiperf, guidellm, lm_eval, open_webui, vllm_bench
from tests.peers.peer import Environment, PeerFailed, Report, Served

PEERS: dict[str, tuple[str, Callable[[Served, Environment], Report]]] = {
    "lm-eval": (lm_eval.PACKAGE, lm_eval.run),
    "guidellm": (guidellm.PACKAGE, guidellm.run),
    "aiperf": (aiperf.PACKAGE, aiperf.run),
    "vllm-bench": (vllm_bench.PACKAGE, vllm_bench.run),
    "open-webui": (open_webui.PACKAGE, open_webui.run),
    "agents": (agents.PACKAGE, agents.run),
}
# float32, because log-probabilities are compared with transformers'. One thread, because two that spin for each other
# are slow beside a client.
FLAGS = ["--dtype", "float32", "--num-threads", "1", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "512M"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description="Heavy foreign clients, once each.")
    parser.add_argument("names", nargs="*", choices=[*PEERS, []], metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write what each printed to FOLDER/NAME.txt")
    arguments = parser.parse_args()
    model = ensure_demo_model(lambda phase, progress, detail: None)
    failed = []
    with own_server(model, DEMO_MODEL_NAME, FLAGS) as server:
        for name in arguments.names or PEERS:
            if not _run(name, Served(server.url, DEMO_MODEL_NAME, model), arguments.keep):
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


def _run(name: str, served: Served, keep: Path | None) -> bool:
    package, run = PEERS[name]
    with tempfile.TemporaryDirectory(prefix=f"ps-{name}-", ignore_cleanup_errors=True) as folder:
        environment = Environment(name, Path(folder))
        if not environment.directory.exists():
            print(f"FAIL {name}: {environment.directory} is not there: make peers", flush=True)
            return False
        client = f"{package} {environment.version(package)}"
        try:
            report = run(served, environment)
        except (PeerFailed, subprocess.TimeoutExpired, OSError, KeyError, ValueError):
            print(f"FAIL {client}", traceback.format_exc(), sep="\n", flush=True)
            return False
    print(f"ok   {client}: {report.summary}", flush=True)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{name}.txt").write_text(f"{client}: {report.summary}\n\n{report.output}")
    return True


if __name__ == "__main__":
    sys.exit(main())
