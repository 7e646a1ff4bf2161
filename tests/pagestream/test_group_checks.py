"""`pagestream doctor --tensor-parallel-size N` on synthetic machines."""

from pathlib import Path
from typing import Any

import pytest

from pagestream import group_checks
from pagestream.group_checks import check_channel, check_group, check_shared_memory

H200 = {"name": "H200", "total_bytes": 141 * 2**30}
LINKED = {frozenset(("0", "1"))}


def machine(*devices: dict[str, Any], peers: list[list[int]] | None = None) -> dict[str, Any]:
    return {"devices": list(devices), "peers": [[0, 1], [1, 0]] if peers is None else peers}


def finding(answer: dict[str, Any] | str, check: str, size: int = 2, links: Any = LINKED) -> tuple[str, str]:
    (found,) = [found for found in check_group(answer, size, links, ["0", "1"]) if found.check == check]
    return found.status, found.message


def test_two_linked_gpus_pass() -> None:
    found = check_group(machine(H200, H200), 2, LINKED, ["0", "1"])
    assert [each.check for each in found] == ["group", "step channel", "peer access", "shared memory"]
    assert (found[0].status, found[0].message) == ("ok", "2 x H200")
    assert (found[2].status, found[2].message) == ("ok", "peer access over NVLink between all GPUs")


@pytest.mark.parametrize(
    ("answer", "size", "status", "message"),
    [
        (machine(H200), 2, "fail", "2 ranks need 2 GPUs, but 1 are visible"),
        (machine(H200, H200), 4, "fail", "4 ranks need 4 GPUs, but 2 are visible"),
        (machine(H200, {**H200, "name": "A10"}), 2, "fail", "the GPUs of a group must be of one kind: H200, A10"),
        (machine(H200, {**H200, "total_bytes": 80 * 2**30}), 2, "warn", "2 x H200 of 80 to 141 GiB"),
        (machine(), 2, "warn", "no CUDA device: 2 processes would share the CPU, which is slower than one"),
    ],
)
def test_impossible_group_fails(answer: dict[str, Any], size: int, status: str, message: str) -> None:
    assert finding(answer, "group", size) == (status, message)


def test_gpus_without_peer_access_warn() -> None:
    message = "no peer access between GPUs 0-1: NCCL sums through the host"
    assert finding(machine(H200, H200, peers=[]), "peer access") == ("warn", message)


@pytest.mark.parametrize("names", [["0", "1"], []], ids=["no link", "no name"])
def test_gpus_without_nvlink_warn(names: list[str]) -> None:
    (found,) = [each for each in check_group(machine(H200, H200), 2, (), names) if each.check == "peer access"]
    assert found.status == "warn" and "probably over PCIe" in found.message


def test_broken_torch_is_not_reported_twice() -> None:
    assert check_group("it died", 2, (), []) == []


def test_little_shared_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_checks, "SHARED_MEMORY_BYTES", 2**62)
    assert (found := check_shared_memory(tmp_path)).status == "warn" and "--shm-size" in found.hint
    monkeypatch.setattr(group_checks, "SHARED_MEMORY_BYTES", 1)
    assert check_shared_memory(tmp_path).status == "ok"
    assert check_shared_memory(tmp_path / "absent").status == "warn"


def test_kernel_without_memfd_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_channel().status == "ok"

    def refused(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refused)
    assert (found := check_channel()).status == "fail" and "Operation not permitted" in found.message
