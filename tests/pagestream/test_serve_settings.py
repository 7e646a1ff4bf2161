"""Which program gets which flag of `pagestream serve`."""

from pathlib import Path
from typing import Any

import pytest

from pagestream.child_commands import ChildCommands, worker_base_id
from pagestream.serve_settings import GATEWAY_FLAGS, PassedFlags, ServeSettings, split_flags
from pagestream.served_models import ModelSource, ServedModel, served_models
from shared.models_file import ModelEntry
from shared.settings import SettingsError, load_settings


async def _nothing(_report: object) -> None: ...


def model(*names: str, num_workers: int = 1, directory: str = "/m", **entry: Any) -> ServedModel:
    source = ModelSource("Model", Path(directory), _nothing)
    return ServedModel(names or ("Model",), source, ModelEntry(model="word", **entry), num_workers)


ONE = [model()]


def test_flags_keep_their_values() -> None:
    words = ["--dtype", "float32", "--max-num-streams", "5", "--block-size=8", "--no-force-include-usage"]
    assert split_flags(words) == PassedFlags(
        gateway=("--max-num-streams", "5", "--no-force-include-usage"),
        worker=("--dtype", "float32", "--block-size=8"),
    )


@pytest.mark.parametrize("flag", sorted(GATEWAY_FLAGS))
def test_each_flag_of_gateways_reaches_them(flag: str) -> None:
    """Also --no-worker, which is no negation of --worker."""
    assert split_flags([flag, "value"]) == PassedFlags(gateway=(flag, "value"), worker=())


def test_a_word_without_a_flag_is_refused() -> None:
    with pytest.raises(SettingsError, match="unexpected argument 'demo'"):
        split_flags(["demo", "--dtype", "float32"])


def test_what_serve_decides_itself_is_refused() -> None:
    with pytest.raises(SettingsError, match="--worker-id: set by serve"):
        split_flags(["--worker-id=me"])


@pytest.mark.parametrize(
    "argv",
    [
        ["--workers", "0"],
        ["--gateways", "0"],
        ["--gateways", "33"],
        ["--port", "0"],
        ["--port", "65536"],
        ["--drain-seconds", "-1"],
    ],
)
def test_values_outside_their_range_are_refused(argv: list[str]) -> None:
    with pytest.raises(SettingsError, match=argv[0]):
        load_settings(ServeSettings, argv, {})


def test_gateway_gets_its_flags() -> None:
    settings = ServeSettings(port=9000, max_model_len=512, files_dir=Path("/files"))
    commands = ChildCommands(settings, split_flags(["--max-num-streams", "5"]), Path("/c.toml"), ONE, "unix:///s")
    command = commands.gateway("gateway")
    assert command.environ is not None and command.environ["PAGESTREAM_REDIS_URL"] == "unix:///s"
    assert list(command.argv[1:]) == [
        "-P", "-m", "gateway", "--model", "/m", "--served-model-name", "Model", "--max-model-len", "512",
        "--drain-seconds", "30.0", "--log-format", "text", "--config", "/c.toml",
        "--host", "127.0.0.1", "--port", "9000", "--files-dir", "/files", "--max-num-streams", "5",
    ]  # fmt: skip


def test_gateways_share_a_port_and_have_one_each() -> None:
    settings = ServeSettings(gateways=2)
    command = ChildCommands(settings, PassedFlags((), ()), None, ONE, "u").gateway("gateway-1")
    assert command.name == "gateway-1"
    assert command.argv[-7:-2] == ["--port", "8000", "--reuse-port", "--own-port", "0"]


def test_gateways_of_one_model_share_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    settings = ServeSettings(gateways=2)
    commands = ChildCommands(settings, PassedFlags((), ()), None, [model("organisation/../model")], "u")
    for name in ("gateway-0", "gateway-1"):
        folder = "/state/pagestream/files/organisation%2F..%2Fmodel"
        assert commands.gateway(name).argv[-2:] == ["--files-dir", folder]


def test_worker_gets_its_flags() -> None:
    commands = ChildCommands(ServeSettings(), split_flags(["--dtype", "float32"]), None, ONE, "unix:///s")
    assert list(commands.worker(ONE[0], 0, worker_base_id("f", 0, 2)).argv[1:]) == [
        "-P", "-m", "engine_worker", "--model", "/m", "--served-model-name", "Model",
        "--drain-seconds", "30.0", "--log-format", "text", "--worker-id", "serve.f.0-2", "--metrics-port", "8001",
        "--dtype", "float32",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "ports"),
    [
        (ServeSettings(), [8001, 8002]),
        (ServeSettings(port=9000), [9001, 9002]),
        (ServeSettings(metrics_port=8405), [8405, 8406]),
        (ServeSettings(metrics_port=0), [0, 0]),
    ],
)
def test_workers_have_neighboring_metrics_ports(settings: ServeSettings, ports: list[int]) -> None:
    assert [settings.metrics_port_of(number) for number in range(2)] == ports


def test_command_lines_do_not_contain_the_store_password() -> None:
    commands = ChildCommands(ServeSettings(), PassedFlags((), ()), None, ONE, "redis://u:hidden@host/0")
    words = [*commands.gateway("g").argv, *commands.worker(ONE[0], 0, "id").argv]
    assert not [word for word in words if "hidden" in word]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "5000"),
        ({"OMP_WAIT_POLICY": "active"}, None),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"KMP_BLOCKTIME": "0"}, None),
    ],
)
def test_worker_threads_spin_shortly_by_default(
    environ: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    worker = ChildCommands(ServeSettings(), PassedFlags((), ()), None, ONE, "u").worker(ONE[0], 0, "id")
    assert worker.environ is not None and worker.environ.get("GOMP_SPINCOUNT") == expected


def test_workers_share_the_cores_by_default() -> None:
    many = [model(num_workers=63), model("other")]
    shared = ChildCommands(ServeSettings(), PassedFlags((), ()), None, many, "u").worker(many[0], 3, "id")
    assert shared.argv[-2:] == ["--num-threads", "1"]
    chosen = ChildCommands(ServeSettings(), split_flags(["--num-threads=2"]), None, many, "u").worker(many[0], 3, "id")
    assert [word for word in chosen.argv if word.startswith("--num-threads")] == ["--num-threads=2"]
    assert shared.name == "worker-3"


def test_gateway_gets_aliases_and_worker_the_first_name() -> None:
    models = [model("name", "alias")]
    commands = ChildCommands(ServeSettings(), PassedFlags((), ()), None, models, "u")
    assert commands.gateway("g").argv[4:9] == ["--model", "/m", "--served-model-name", "name", "alias"]
    assert commands.worker(models[0], 0, "id").argv[6:9] == ["--served-model-name", "name", "--drain-seconds"]


def test_gateway_gets_a_models_file_and_each_worker_one_model(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    (tmp_path / "second").mkdir()
    path.write_text(
        f'[[models]]\nmodel = "{tmp_path}"\nnames = ["first", "alias"]\nworkers = 2\nmax_model_len = 8\n'
        f"worker = {{ block_size = 8, enforce-eager = true, enable-prefix-caching = false }}\n"
        f'[[models]]\nmodel = "{tmp_path}/second"\n'
    )
    settings = ServeSettings(models_file=path, workers=3, max_model_len=64)
    first, second = models = served_models(settings)
    assert [(one.names, one.num_workers) for one in models] == [(("first", "alias"), 2), (("second",), 3)]
    commands = ChildCommands(settings, split_flags(["--num-threads", "1"]), None, models, "u", Path("/f"))
    assert commands.gateway("g").argv[4:8] == ["--models-file", "/f", "--max-model-len", "64"]
    assert commands.gateway("g").argv[-1].endswith("/first%2Bsecond")
    assert list(commands.worker(first, 0, "id").argv[-6:]) == [
        "--num-threads", "1", "--block-size", "8", "--enforce-eager", "--no-enable-prefix-caching",
    ]  # fmt: skip
    words = [list(commands.worker(one, 0, "id").argv[4:10]) for one in models]
    assert words == [
        ["--model", str(tmp_path), "--served-model-name", "first", "--max-model-len", "8"],
        ["--model", f"{tmp_path}/second", "--served-model-name", "second", "--max-model-len", "64"],
    ]
    assert first.resolved.names == ("first", "alias") and second.resolved.model == f"{tmp_path}/second"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ('[[models]]\nmodel = "."\nworker = { worker-id = "x" }', "worker.worker-id: set by serve"),
        ('[[models]]\nmodel = "."\nworker = { model = "x" }', "worker.model: set by serve"),
        ('[[models]]\nmodel = "."\n[[models]]\nmodel = "."', "used twice"),
    ],
)
def test_unservable_model_entries_are_refused(tmp_path: Path, entries: str, message: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(entries)
    with pytest.raises(SettingsError, match=message):
        served_models(ServeSettings(models_file=path))


def test_model_and_models_file_together_are_refused() -> None:
    with pytest.raises(SettingsError, match="--models-file: it contains the models"):
        ServeSettings(models_file=Path("/f"), model="demo")
    assert [one.name for one in served_models(ServeSettings())] == ["SmolLM2-135M-Instruct"]
