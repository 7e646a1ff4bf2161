"""`pagestream doctor`: is everything here that serving needs? One line a check: ok, warn or fail, and what would help.

torch is asked in a process of its own (its import takes seconds, and a broken one must not take the doctor along).
Changes nothing, starts no server, downloads nothing.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from redis.exceptions import RedisError

from pagestream.address import AddressInUse, require_free_port
from pagestream.demo_model import demo_model_directory, installed_gguf
from pagestream.directories import cache_directory, state_directory
from pagestream.embedded_store import StoreError, server_binary
from pagestream.serve_settings import DEMO
from shared.redis_client import connect

PYTHON_MINIMUM, PYTHON_BELOW = (3, 11), (3, 13)
REDIS_MINIMUM = (7, 0)
DISK_FREE_BYTES = 2**30  # the demo's weights as a file and converted, with room for the append-only file
TORCH_PROBE_SECONDS = 60.0
_TORCH_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({"torch": torch.__version__, "devices": [
    {"name": torch.cuda.get_device_name(i), "free_bytes": torch.cuda.mem_get_info(i)[0]}
    for i in range(torch.cuda.device_count() if cuda else 0)
], "cpu_capability": torch.backends.cpu.get_cpu_capability()}))
"""


@dataclass(frozen=True)
class Finding:
    check: str
    status: Literal["ok", "warn", "fail"]
    message: str
    hint: str = ""


def main(argv: Sequence[str]) -> int:
    """Exit status 0 if nothing failed, else 1."""
    parser = argparse.ArgumentParser(prog="pagestream doctor", description="Check this machine.")
    parser.add_argument("--model", default=DEMO, help="a model directory, a .gguf file, or the word demo")
    parser.add_argument("--redis-url", default="", help="a Redis or Valkey to examine; default: the embedded one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    findings = examine(args.model, args.redis_url, args.host, args.port)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.status:<5} {finding.check:<16} {finding.message}")
            if finding.hint:
                print(f"{'':<22} -> {finding.hint}")
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def examine(model: str, redis_url: str, host: str, port: int) -> list[Finding]:
    findings = [check_python(sys.version_info[:2]), *check_torch(probe_torch())]
    findings += asyncio.run(check_redis(redis_url)) if redis_url else [check_embedded_store(server_binary)]
    findings += [check_port(host, port), check_model(model)]
    findings += [check_disk("disk (cache)", cache_directory()), check_disk("disk (state)", state_directory())]
    return findings


def check_python(version: tuple[int, ...]) -> Finding:
    found = ".".join(map(str, version))
    if PYTHON_MINIMUM <= version < PYTHON_BELOW:
        return Finding("python", "ok", f"{found} at {sys.executable}")
    return Finding("python", "fail", f"{found}", "use Python 3.11 or 3.12")


def probe_torch() -> dict[str, object] | str:
    """What torch says of itself, or why it could not be asked."""
    try:
        probe = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH_PROBE],
            capture_output=True, text=True, timeout=TORCH_PROBE_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"its import takes longer than {TORCH_PROBE_SECONDS:.0f} s"
    if probe.returncode != 0:
        return (probe.stderr.strip().splitlines() or ["it died without a word"])[-1]
    answer: dict[str, object] = json.loads(probe.stdout)
    return answer


def check_torch(answer: dict[str, object] | str) -> list[Finding]:
    if isinstance(answer, str):
        hint = "pip install --require-hashes -r requirements/engine-cpu.txt; a gateway alone needs no torch"
        return [Finding("torch", "fail", answer, hint)]
    devices = answer["devices"]
    assert isinstance(devices, list)
    torch = Finding("torch", "ok", f"{answer['torch']}")
    if not devices:
        cpu = f"no CUDA device: the CPU serves ({answer['cpu_capability']}, {os.cpu_count()} CPUs)"
        return [torch, Finding("device", "ok", cpu)]
    names = ", ".join(f"{device['name']} ({device['free_bytes'] / 2**30:.1f} GiB free)" for device in devices)
    return [torch, Finding("device", "ok", names), check_triton_compiler()]


def check_triton_compiler() -> Finding:
    """Triton compiles a launcher in C when a kernel is first run: a slim image without gcc fails in the warm-up."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not compiler:
        return Finding("triton compiler", "fail", "no C compiler", "apt-get install gcc libc6-dev, or set CC")
    if not header.is_file():
        return Finding("triton compiler", "fail", f"no {header}", "apt-get install python3-dev")
    return Finding("triton compiler", "ok", f"{compiler}, {header}")


def check_embedded_store(find_binary: Callable[[], Path]) -> Finding:
    try:
        binary = find_binary()
        command = [str(binary), "--version"]
        version = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (StoreError, OSError, subprocess.SubprocessError) as error:
        return Finding("store", "fail", str(error), "or name a running server with --redis-url")
    return Finding("store", "ok", f"embedded: {' '.join(version.split()[:3])}, AOF each second, noeviction")


async def check_redis(url: str) -> list[Finding]:
    connections = connect(url)
    try:
        server = await connections.commands.info("server")
        memory = await connections.commands.info("memory")
        persistence = await connections.commands.info("persistence")
    except (RedisError, OSError, ValueError) as error:
        return [Finding("store", "fail", f"{url}: {error}", "is it running, and is the URL right?")]
    finally:
        await connections.aclose()
    return judge_redis(server, memory, persistence)


def judge_redis(server: dict[str, object], memory: dict[str, object], persistence: dict[str, object]) -> list[Finding]:
    name = "valkey" if "valkey_version" in server else "redis"
    version = str(server.get("valkey_version") or server.get("redis_version"))
    new_enough = tuple(int(part) for part in version.split(".")[:2]) >= REDIS_MINIMUM
    policy = str(memory.get("maxmemory_policy"))
    durable = bool(persistence.get("aof_enabled"))
    return [
        Finding("store", "ok", f"{name} {version}")
        if new_enough
        else Finding("store", "fail", f"{name} {version}", "Redis 7.0 or Valkey 8 is needed"),
        Finding("store eviction", "ok", policy)
        if policy == "noeviction"
        else Finding("store eviction", "fail", policy, "CONFIG SET maxmemory-policy noeviction: else requests vanish"),
        Finding("store AOF", "ok", "on")
        if durable
        else Finding("store AOF", "warn", "off", "CONFIG SET appendonly yes: else a restart loses accepted requests"),
    ]


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
            return Finding("model", "ok", f"demo, to be converted at the first start: {gguf}")
        return Finding("model", "warn", "demo, to be downloaded at the first start (93 MB)")
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return Finding("model", "ok", f"{path}, to be converted at the first start")
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    missing += [] if any(path.glob("*.safetensors")) else ["*.safetensors"]
    if missing:
        return Finding("model", "fail", f"{path}: no {', no '.join(missing)}", "give a Hugging Face style directory")
    return Finding("model", "ok", str(path))


def check_disk(check: str, directory: Path) -> Finding:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    message = f"{free / 2**30:.1f} GiB free for {directory}"
    if not os.access(existing, os.W_OK):
        return Finding(check, "fail", f"{existing} cannot be written")
    if free < DISK_FREE_BYTES:
        return Finding(check, "warn", message, f"{DISK_FREE_BYTES / 2**30:.0f} GiB is advised")
    return Finding(check, "ok", message)
