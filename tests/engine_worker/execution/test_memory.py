"""Device memory by use: on CUDA the uses add up to the total, on a CPU as far as they are known."""

import pytest
import torch

from engine_worker.execution.step import memory
from engine_worker.execution.step.memory import memory_by_use

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_memory_by_use_on_cuda_adds_up_to_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))  # free, total
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 820)
    uses = memory_by_use(CUDA, weights_bytes=300, kv_bytes=400, host_kv_bytes=5000)
    assert uses == {"weights": 300, "kv": 400, "workspace": 120, "other": 80, "free": 100}
    assert sum(uses.values()) == 1000


def test_memory_by_use_on_cpu_includes_host_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: (1000, 200))  # total, free
    uses = memory_by_use(CPU, weights_bytes=100, kv_bytes=300, host_kv_bytes=50)
    assert uses == {"weights": 100, "kv": 300, "kv_host": 50, "other": 350, "free": 200}
    monkeypatch.setattr(memory, "host_memory", lambda: (1000, 700))  # most pages of the pool are untouched
    assert memory_by_use(CPU, 100, 300, 50)["other"] == 0
