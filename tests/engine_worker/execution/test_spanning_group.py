"""Ranks without a common parent or file system form a group by an address and give the same as one rank."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.serving.free_port import free_port
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.load.load_replica import load_plan
from engine_worker.execution.ranks.group_messages import GroupStart, encode, start_of
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step.model_runner import ModelRunner
from shared.messages import GenerationRequest
from shared.settings import SettingsError
from tests.builders import make_request
from tests.engine_worker.execution.group_runs import write_shape
from tests.engine_worker.execution.reference import run_engine, write_model

pytestmark = [pytest.mark.tp, pytest.mark.e2e]
ROOT = Path(__file__).parents[3]
SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
CONFIG: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
SECONDS = 100.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("first") / "model", num_hidden_layers=2)


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    """Leave a group that was joined before a failed load. In a worker, its process ends instead."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def load(model_dir: Path, endpoint: str = "") -> ModelRunner:
    settings = ExecutionSettings(
        model=model_dir,
        device="cpu",
        dtype="float32",
        num_threads=1,
        tensor_parallel_size=2 if endpoint else 1,
        rendezvous_endpoint=endpoint,
        kv_cache_memory_bytes=2**21,
        swap_space_bytes=0,
        max_model_len=128,
        **CONFIG,
    )
    return load_model_runner(settings, lambda phase, progress, detail: None)


def start_follower(endpoint: str, model: Path) -> "subprocess.Popen[str]":
    """Start a follower like on another host: its own directory and model, and nothing inherited."""
    argv = [sys.executable, "-m", "engine_worker.remote_follower", "--rendezvous-endpoint", endpoint]
    argv += ["--rank", "1", "--tensor-parallel-size", "2", "--model", str(model)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(argv, cwd=model, env=environ, stderr=subprocess.PIPE, text=True)


def start_rank_0(endpoint: str, model: Path) -> "subprocess.Popen[str]":
    """Start a process that loads rank 0, prints a line, and then waits like between two steps."""
    code = (
        "import sys; from pathlib import Path; from tests.engine_worker.execution.test_spanning_group import load; "
        "runner = load(Path(sys.argv[1]), sys.argv[2]); print('loaded', flush=True); sys.stdin.read()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(model), endpoint],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def requests() -> list[GenerationRequest]:
    return [make_request(length, f"r{length}", max_tokens=12, prompt_logprobs=1) for length in (1, 9, 50)]


def test_spanning_group_equals_one_rank_and_ends_with_rank_0(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may not resolve to a reachable address
    expected = run_engine(load(model_dir), requests(), **CONFIG)
    elsewhere = shutil.copytree(model_dir, tmp_path / "model")
    endpoint = f"127.0.0.1:{free_port()}"
    follower = start_follower(endpoint, elsewhere)
    runner = load(model_dir, endpoint)
    assert run_engine(runner, requests(), async_scheduling=True, **CONFIG).tokens == expected.tokens
    assert runner.group is not None and runner.group.health().ranks_up == (True, True)
    runner.group.close()
    _, log = follower.communicate(timeout=SECONDS)
    assert follower.returncode == 1, log
    assert "rank 1 of 2: allocate_kv" in log and "rank 1 ends" in log


def test_spanning_group_dead_rank_fails_next_step(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    endpoint = f"127.0.0.1:{free_port()}"
    follower = start_follower(endpoint, model_dir)
    runner = load(model_dir, endpoint)
    follower.kill()
    follower.communicate(timeout=SECONDS)
    with pytest.raises(RuntimeError, match=r"Connection (closed|reset)|Broken pipe"):
        run_engine(runner, requests(), **CONFIG)
    assert runner.group is not None
    runner.group.close()


def test_spanning_group_rank_ends_when_rank_0_is_killed(model_dir: Path) -> None:
    """On another host there is no parent-death signal: the closed connection ends the rank."""
    endpoint = f"127.0.0.1:{free_port()}"
    follower, first = start_follower(endpoint, model_dir), start_rank_0(endpoint, model_dir)
    assert first.stdout is not None and first.stdout.readline() == "loaded\n"
    assert follower.poll() is None
    first.kill()
    first.communicate(timeout=SECONDS)
    _, log = follower.communicate(timeout=SECONDS)
    assert follower.returncode == 1 and "rank 1 ends" in log


def test_spanning_group_different_models_are_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    other = write_model(tmp_path / "model", num_hidden_layers=3)
    endpoint = f"127.0.0.1:{free_port()}"
    follower = start_follower(endpoint, other)
    with pytest.raises(ValueError, match=r"the ranks have different files; .* of rank 0 has the checksum"):
        load(model_dir, endpoint)
    _, log = follower.communicate(timeout=SECONDS)
    assert follower.returncode == 2 and "rank 1 cannot start: --model: the ranks have different files" in log


@pytest.mark.parametrize("has_bf16", [True, False])
def test_spanning_group_rank_0_selects_dtype_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    """On a CPU the dtype depends on the host's instructions; ranks must not add different dtypes."""
    model = write_shape(tmp_path / "model", model_type="llama", torch_dtype="bfloat16", **SHAPE)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    first = load_plan(ExecutionSettings(model=model, load_format="dummy", device="cpu", tensor_parallel_size=2))
    chosen = first.dtype
    assert chosen == (torch.bfloat16 if has_bf16 else torch.float32)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: not has_bf16)
    assert load_plan(start_of(encode(GroupStart(first.settings))).settings, 1).dtype == chosen


@pytest.mark.parametrize("endpoint", ["host", "host:0", ":1", "host:65536", "host:x"])
def test_rendezvous_endpoint_invalid_is_refused(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(SettingsError, match="--rendezvous-endpoint: expected HOST:PORT with a port from 1 to 65535"):
        ExecutionSettings(model=tmp_path, tensor_parallel_size=2, rendezvous_endpoint=endpoint)


def test_rendezvous_endpoint_without_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="needs --tensor-parallel-size 2 or more"):
        ExecutionSettings(model=tmp_path, rendezvous_endpoint="host:1")
