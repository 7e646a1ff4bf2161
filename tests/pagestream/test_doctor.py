"""Findings of `pagestream doctor`, on synthetic and on real machines."""

import json
import socket
from pathlib import Path

import pytest

from pagestream import doctor
from pagestream.finding import Finding

OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)\n"
CLOSED_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC: 12\n"

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(("minor", "status"), [(10, "fail"), (11, "ok"), (12, "ok"), (13, "fail")])
def test_unsupported_python_fails(minor: int, status: str) -> None:
    assert doctor.check_python((3, minor)).status == status


def test_torch_that_cannot_be_imported_fails() -> None:
    (finding,) = doctor.check_torch("ModuleNotFoundError: No module named 'torch'", "")
    assert (finding.status, finding.message) == ("fail", "ModuleNotFoundError: No module named 'torch'")


def torch_says(cuda: str | None, *devices: dict[str, object]) -> dict[str, object]:
    return {
        "torch": "2.13",
        "cuda": cuda,
        "devices": list(devices),
        "cpu_capability": "AVX512",
        "cpu_kernels": [True, "AVX2, /cache/cpu-0.so"],
        "cpu_layers": [True, "C++ kernels"],
        "number_format": "--quantization auto is as-stored",
    }


def test_compiler_is_required_only_with_a_cuda_device() -> None:
    on_cpu = doctor.check_torch(torch_says(None), "")
    assert [finding.check for finding in on_cpu] == ["torch", "device", "cpu kernels", "cpu layers", "number format"]
    assert on_cpu[-1].message == "--quantization auto is as-stored"
    on_gpu = torch_says("13.0", {"name": "H200", "free_bytes": 139 * 2**30, "capability": [9, 0]})
    findings = doctor.check_torch(on_gpu, "570.86.15")
    assert [finding.check for finding in findings] == ["torch", "device", "triton compiler"]
    assert findings[0].message == "2.13, built for CUDA 13.0"
    assert findings[1].message == "H200 (sm_90, 139.0 GiB free), driver 570.86.15"


@pytest.mark.parametrize(("cuda", "hint"), [("13.0", "CUDA_VISIBLE_DEVICES"), (None, "engine-gpu.txt")])
def test_driver_that_torch_does_not_use_is_reported(cuda: str | None, hint: str) -> None:
    _, device, *_ = doctor.check_torch(torch_says(cuda), "570.86.15")
    assert device.status == "warn" and hint in device.hint
    assert device.message.startswith("NVIDIA driver 570.86.15 is loaded, but no CUDA device")


@pytest.mark.parametrize(
    ("text", "version"),
    [(OPEN_MODULE, "570.86.15"), (CLOSED_MODULE, "550.54.15"), ("other", "of unknown version"), (None, "")],
)
def test_driver_version_is_checked(tmp_path: Path, text: str | None, version: str) -> None:
    file = tmp_path / "version"
    if text is not None:
        file.write_text(text)
    assert doctor.nvidia_driver(file) == version


def test_missing_compiler_fails_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    finding = doctor.check_triton_compiler()
    assert (finding.status, finding.message) == ("fail", "no C compiler")
    assert "gcc" in finding.hint


def test_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        finding = doctor.check_port("127.0.0.1", port)
        assert finding.status == "fail"
        assert finding.message == f"port {port} on 127.0.0.1 is in use; choose another one with --port"
    assert doctor.check_port("127.0.0.1", port).status == "ok"


def test_model_directories_are_checked(tmp_path: Path) -> None:
    assert doctor.check_model(str(tmp_path)).message.endswith("no config.json, no tokenizer.json, no *.safetensors")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert doctor.check_model(str(tmp_path)).status == "ok"


def test_little_disk_space_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISK_FREE_BYTES", 2**80)
    assert doctor.check_disk("disk", tmp_path / "not" / "yet").status == "warn"


def test_auto_format_is_reported_by_the_worker(tmp_path: Path) -> None:
    """The process that imports torch reports it; a GPU without KV blocks has nothing to report."""
    (tmp_path / "stored_blocks.safetensors").touch()
    answer = doctor.probe_torch(tmp_path)
    assert isinstance(answer, dict)
    has_reason = str(answer["number_format"]).startswith("--quantization auto is ")
    assert has_reason is not bool(answer["devices"])
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "dtype": "bfloat16"}))
    of_kv = "; --kv-cache-dtype auto is bfloat16: "
    in_16_bits = doctor.probe_torch(tmp_path)
    assert isinstance(in_16_bits, dict)
    assert (of_kv in str(in_16_bits["number_format"])) is ("auto is as-stored" in str(answer["number_format"]))
    (tmp_path / "stored_blocks.safetensors").unlink()
    without = doctor.probe_torch(tmp_path)
    assert isinstance(without, dict) and without["number_format"] == ""


def test_json_output_and_exit_status_agree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
