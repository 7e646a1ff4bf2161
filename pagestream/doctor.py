"""`pagestream doctor`: check that this machine can serve. One line per check: ok, warn, or fail, and a fix.

torch is examined in a separate process, because its import takes seconds, and a broken one must not end the doctor.
It changes nothing, starts no server, and downloads nothing.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagestream.address import AddressInUse, require_free_port
from pagestream.cpu_checks import check_cpu_kernels, check_cpu_layers, check_number_format, instruction_sets
from pagestream.demo_model import demo_model_directory, installed_gguf
from pagestream.directories import cache_directory, state_directory
from pagestream.embedded_store import server_binary
from pagestream.finding import Finding
from pagestream.gguf_model import ModelUnavailable
from pagestream.gpus import visible_gpus
from pagestream.group_checks import check_group
from pagestream.hub_model import hub_model
from pagestream.installation import HOME, PACKAGES, foreign_packages
from pagestream.nvlink import nvlinks
from pagestream.serve_settings import DEMO
from pagestream.served_models import find_model
from pagestream.store_checks import check_embedded_store, check_redis

PYTHON_MINIMUM, PYTHON_BELOW = (3, 11), (3, 13)
DISK_FREE_BYTES = 2**30  # the demo model's weights as a file and converted, and the append-only file
TORCH_PROBE_SECONDS = 60.0
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # exists while the kernel module is loaded, also in containers
_TORCH_PROBE = """
import json, sys, torch
from pathlib import Path
from engine_worker.execution.load.kv_dtype_choice import describe_formats
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.load.layer_forms import describe_cpu_layers
from kernels.cpu.__main__ import look
cuda = torch.cuda.is_available()
kernels = look()
settings = ExecutionSettings(model=Path(sys.argv[1]))
formats = describe_formats(settings, "cuda" if cuda else "cpu", lambda: "" if kernels[0] else kernels[1])
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "devices": [
    {"name": torch.cuda.get_device_name(i), "free_bytes": torch.cuda.mem_get_info(i)[0],
     "total_bytes": torch.cuda.mem_get_info(i)[1], "capability": torch.cuda.get_device_capability(i)}
    for i in range(torch.cuda.device_count() if cuda else 0)
], "peers": [
    [i, j] for i in range(torch.cuda.device_count() if cuda else 0) for j in range(torch.cuda.device_count())
    if i != j and torch.cuda.can_device_access_peer(i, j)
], "cpu_capability": torch.backends.cpu.get_cpu_capability(), "cpu_kernels": kernels,
"number_format": formats,
"cpu_layers": describe_cpu_layers(settings, "" if kernels[0] else kernels[1])}))
"""


def main(argv: Sequence[str]) -> int:
    """Run all checks. Returns 0 if none failed, else 1."""
    args = build_parser().parse_args(argv)
    findings = examine(args.model, args.redis_url, args.host, args.port, args.tensor_parallel_size)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.status:<5} {finding.check:<16} {finding.message}")
            if finding.hint:
                print(f"{'':<22} -> {finding.hint}")
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagestream doctor", description="Check this machine.")
    parser.add_argument(
        "--model", default=DEMO, metavar="NAME", help="model directory, .gguf file, ORG/NAME[:TAG], or demo"
    )
    parser.add_argument(
        "--redis-url", default="", metavar="URL", help="URL of the Redis or Valkey to check; default: the embedded one"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--tensor-parallel-size", type=_size, default=1, metavar="N", help="number of GPUs that share the model"
    )
    parser.add_argument("--json", action="store_true")
    return parser


def examine(model: str, redis_url: str, host: str, port: int, tensor_parallel_size: int = 1) -> list[Finding]:
    torch = probe_torch(_directory(model))
    findings = [check_python(sys.version_info[:2]), *check_packages(), *check_torch(torch, nvidia_driver())]
    if tensor_parallel_size > 1:
        gpus = visible_gpus(os.environ)
        findings += check_group(torch, tensor_parallel_size, nvlinks(gpus), gpus)
    findings += asyncio.run(check_redis(redis_url)) if redis_url else check_embedded_store(server_binary)
    findings += [check_port(host, port), check_model(model)]
    findings += [check_disk("disk (cache)", cache_directory()), check_disk("disk (state)", state_directory())]
    return findings


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return int(text)


def check_packages() -> list[Finding]:
    """Warn of each of our package names that another distribution has installed."""
    warnings = [Finding("packages", "warn", foreign.message, foreign.hint) for foreign in foreign_packages()]
    return warnings or [Finding("packages", "ok", f"{', '.join(PACKAGES)} in {HOME}")]


def check_python(version: tuple[int, ...]) -> Finding:
    found = ".".join(map(str, version))
    if PYTHON_MINIMUM <= version < PYTHON_BELOW:
        return Finding("python", "ok", f"{found} at {sys.executable}")
    return Finding("python", "fail", f"{found}", "use Python 3.11 or 3.12")


def _directory(model: str) -> Path:
    """Return the directory of `model`, which may not exist before its first start."""
    try:
        return find_model(model).directory
    except ModelUnavailable:
        return Path(model)


def probe_torch(model: Path) -> dict[str, Any] | str:
    """Return torch's properties and devices, or the error of the probe. `model` is a directory."""
    try:
        probe = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH_PROBE, str(model)],
            capture_output=True, text=True, timeout=TORCH_PROBE_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"its import takes longer than {TORCH_PROBE_SECONDS:.0f} s"
    if probe.returncode != 0:
        return (probe.stderr.strip().splitlines() or ["it ended without a message"])[-1]
    answer: dict[str, Any] = json.loads(probe.stdout)
    return answer


def nvidia_driver(file: Path = NVIDIA_DRIVER) -> str:
    """Return the version of the kernel's NVIDIA driver; empty without one."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", file.read_text())
    except OSError:
        return ""
    return found[1] if found else "of unknown version"


def check_torch(answer: dict[str, Any] | str, driver: str) -> list[Finding]:
    """Check torch and the device. `driver` is the result of nvidia_driver()."""
    if isinstance(answer, str):
        hint = "pip install 'pagestream[serve]', or make setup in a clone; a gateway needs no torch"
        return [Finding("torch", "fail", answer, hint)]
    devices, cuda = answer["devices"], answer["cuda"]
    assert isinstance(devices, list)
    built = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    torch = Finding("torch", "ok", f"{answer['torch']}, {built}")
    if devices:
        names = ", ".join(map(_describe, devices))
        found = f"{names}, driver {driver or 'of unknown version'}"
        return [torch, Finding("device", "ok", found), check_triton_compiler()]
    cpu = f"no CUDA device; serving on the CPU ({answer['cpu_capability']}, {os.cpu_count()} CPUs)"
    of_kernels = answer["cpu_kernels"]
    assert isinstance(of_kernels, list)
    has_kernels, message = of_kernels
    on_cpu = [
        check_cpu_kernels(has_kernels, message, instruction_sets()),
        *check_cpu_layers(*answer["cpu_layers"]),
        check_number_format(str(answer["number_format"])),
    ]
    if not driver:
        return [torch, Finding("device", "ok", cpu), *on_cpu]
    hint = (
        f"is the driver too old for CUDA {cuda}, or does CUDA_VISIBLE_DEVICES hide the device?"
        if cuda
        else "install torch with CUDA; in a clone: pip install --require-hashes -r requirements/engine-gpu.txt"
    )
    return [torch, Finding("device", "warn", f"NVIDIA driver {driver} is loaded, but {cpu}", hint), *on_cpu]


def _describe(device: dict[str, Any]) -> str:
    major, minor = device["capability"]
    return f"{device['name']} (sm_{major}{minor}, {device['free_bytes'] / 2**30:.1f} GiB free)"


def check_triton_compiler() -> Finding:
    """Check the C compiler, with which Triton compiles kernel launchers; without it the warm-up fails."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not compiler:
        return Finding("triton compiler", "fail", "no C compiler", "apt-get install gcc libc6-dev, or set CC")
    if not header.is_file():
        return Finding("triton compiler", "fail", f"no {header}", "apt-get install python3-dev")
    return Finding("triton compiler", "ok", f"{compiler}, {header}")


def check_port(host: str, port: int) -> Finding:
    try:
        require_free_port(host, port)
    except AddressInUse as error:
        return Finding("port", "fail", str(error))
    return Finding("port", "ok", f"{port} on {host} is free")


def check_model(model: str) -> Finding:
    if model == DEMO:
        if demo_model_directory().is_dir():
            return Finding("model", "ok", f"demo, converted: {demo_model_directory()}")
        if gguf := installed_gguf():
            return Finding("model", "ok", f"demo, will be converted at the first start: {gguf}")
        return Finding("model", "warn", "demo, will be downloaded at the first start (93 MB)")
    path = Path(model).expanduser()
    if later := _found_at_the_start(model, path):
        return Finding("model", "ok", later)
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    missing += [] if any(path.glob("*.safetensors")) else ["*.safetensors"]
    if missing:
        return Finding(
            "model", "fail", f"{path}: no {', no '.join(missing)}", "use a model directory in Hugging Face format"
        )
    return Finding("model", "ok", str(path))


def _found_at_the_start(model: str, path: Path) -> str:
    """Return what the first start does with `model`; empty if it must be a model directory already."""
    if path.suffix == ".gguf" and path.is_file():
        return f"{path}, will be converted at the first start"
    if not path.exists() and hub_model(model) is not None:
        return f"{model}, will be found in the hub's cache or downloaded at the first start"
    return ""


def check_disk(check: str, directory: Path) -> Finding:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    message = f"{free / 2**30:.1f} GiB free for {directory}"
    if not os.access(existing, os.W_OK):
        return Finding(check, "fail", f"{existing} is not writable")
    if free < DISK_FREE_BYTES:
        return Finding(check, "warn", message, f"at least {DISK_FREE_BYTES / 2**30:.0f} GiB is recommended")
    return Finding(check, "ok", message)
