"""The wheels: their content, and that they serve without a clone.

Each is installed into an environment of its own, whose dependencies are those of this environment; nothing is
downloaded.
"""

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving.free_port import free_port
from kernels.cpu.build import library_name
from pagestream.installation import PACKAGES
from tests.patience import PATIENCE_SECONDS
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
SMALL = ["--load-format", "dummy", "--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--num-threads", "1"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the wheels by platform."""
    directory = tmp_path_factory.mktemp("wheels")
    subprocess.run([sys.executable, ".ci/wheels", str(directory)], cwd=ROOT, check=True)
    return {path.stem.rpartition("-")[2]: path for path in directory.iterdir()}


@pytest.fixture(scope="module", params=["any", "manylinux_2_28_x86_64"])
def wheel(request: pytest.FixtureRequest, wheels: dict[str, Path]) -> Path:
    return wheels[request.param]


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs of an environment with the wheel."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    # Install with pip instead of copying, because it also writes the command `pagestream`.
    install = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    # Only now, because pip would have found our editable install there. Its .pth file is not read from here.
    folder = environment / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (folder / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


def test_wheel_contains_exactly_the_serving_files(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    compiled = {f"kernels/cpu/{library_name()}"} if "manylinux" in wheel.name else set()
    assert packed == set(tracked(*PACKAGES)) | compiled
    assert {name.split("/")[0] for name in packed} == set(PACKAGES)


def test_library_runs_with_glibc_2_28_and_the_openmp_of_torch(wheels: dict[str, Path], tmp_path: Path) -> None:
    archive = zipfile.ZipFile(wheels["manylinux_2_28_x86_64"])
    library = archive.extract(f"kernels/cpu/{library_name()}", tmp_path)
    read = subprocess.run(["readelf", "-dVW", library], check=True, capture_output=True, text=True).stdout
    assert max(tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", read)) <= (2, 28)
    # The newest of libstdc++ and of its runtime in GCC 8, the compiler of manylinux_2_28.
    assert max(tuple(map(int, found.split("."))) for found in re.findall(r"GLIBCXX_([\d.]+)", read)) <= (3, 4, 25)
    assert "gomp" not in read


def test_library_of_the_wheel_needs_no_compiler(
    programs: Path, wheel: Path, elsewhere: tuple[Path, dict[str, str]]
) -> None:
    directory, environ = elsewhere
    command = [str(programs / "python"), "-P", "-m", "kernels.cpu"]
    environ = environ | {"CXX": str(directory / "no-compiler"), "XDG_CACHE_HOME": str(directory)}
    done = subprocess.run(command, cwd=directory, env=environ, check=True, capture_output=True, text=True)
    expected = str(programs.parent) if "manylinux" in wheel.name else "falling back to torch operators"
    assert expected in done.stdout


def test_serve_extra_contains_the_extras_of_its_programs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    needed = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist:")]
    assert 'Requires-Dist: pagestream[cuda,embedded,engine,gateway]; extra == "serve"' in needed
    assert 'Requires-Dist: pagestream[embedded,engine,gateway]; extra == "serve-cpu"' in needed
    assert [line for line in needed if "triton" in line] == [line for line in needed if 'extra == "cuda"' in line]
    assert not [line for line in needed if "torch" in line and "extra" not in line]


@pytest.fixture
def elsewhere(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return a folder far from the clone, with packages of our names in it, and another user's environment."""
    for name in ("shared", "kernels", "gateway"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not ours')")
    ours = ("PAGESTREAM_", "PYTHON", "COVERAGE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return tmp_path, environ | {"XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def address(programs: Path, elsewhere: tuple[Path, dict[str, str]]) -> Iterator[str]:
    """Return the address of the wheel's `pagestream serve`, on a model of two layers."""
    directory, environ = elsewhere
    model = write_tiny_model(directory / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **SHAPE}))
    port = free_port()
    argv = [str(programs / "pagestream"), "serve", str(model), "--port", str(port), "--metrics-port", "0", *SMALL]
    with subprocess.Popen(argv, cwd=directory, env=environ, stdout=subprocess.PIPE, text=True) as serve:
        assert serve.stdout is not None
        lines = []
        for line in serve.stdout:
            lines.append(line)
            if line.startswith("Ready after"):
                break
        else:
            pytest.fail("".join(lines))
        assert not [line for line in lines if "warning" in line]
        yield f"http://127.0.0.1:{port}"
        serve.send_signal(signal.SIGTERM)
        serve.communicate()
    assert serve.returncode == 0


def test_wheel_serves_without_a_clone(address: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "the capital"}], "max_tokens": 5, "stop": None}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] in range(1, 6)
    with urllib.request.urlopen(f"{address}/", timeout=PATIENCE_SECONDS) as page:
        assert b"<html" in page.read()


def run(programs: Path, elsewhere: tuple[Path, dict[str, str]], *arguments: str) -> "subprocess.CompletedProcess[str]":
    directory, environ = elsewhere
    argv = [str(programs / "pagestream"), *arguments]
    return subprocess.run(argv, cwd=directory, env=environ, capture_output=True, text=True, check=False)


def test_doctor_of_the_wheel_finds_packages_and_demo(programs: Path, elsewhere: tuple[Path, dict[str, str]]) -> None:
    findings = {found["check"]: found for found in json.loads(run(programs, elsewhere, "doctor", "--json").stdout)}
    assert findings["packages"]["status"] == "ok"
    assert str(programs.parent) in findings["packages"]["message"]
    assert "demo" in findings["model"]["message"] and findings["model"]["status"] == "ok"


def test_bench_of_the_wheel_names_the_repository(programs: Path, elsewhere: tuple[Path, dict[str, str]]) -> None:
    done = run(programs, elsewhere, "bench")
    assert done.returncode == 2
    assert "run it in a clone" in done.stderr
