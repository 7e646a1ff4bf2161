"""Who gets which flag of `pagestream serve`."""

from pathlib import Path

import pytest

from pagestream.child_commands import ChildCommands, worker_base_id
from pagestream.model_source import ModelSource
from pagestream.serve_settings import PassedFlags, ServeSettings, split_flags
from shared.settings import SettingsError, load_settings


async def _nothing(_report: object) -> None: ...


SOURCE = ModelSource("Model", Path("/m"), _nothing)


def test_flags_take_their_values_along() -> None:
    words = ["--dtype", "float32", "--max-num-streams", "5", "--block-size=8", "--no-force-include-usage"]
    assert split_flags(words) == PassedFlags(
        gateway=("--max-num-streams", "5", "--no-force-include-usage"),
        worker=("--dtype", "float32", "--block-size=8"),
    )


def test_a_word_without_a_flag_is_refused() -> None:
    with pytest.raises(SettingsError, match="unexpected argument 'demo'"):
        split_flags(["demo", "--dtype", "float32"])


def test_what_serve_decides_itself_is_refused() -> None:
    with pytest.raises(SettingsError, match="--worker-id: is set by serve itself"):
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
def test_ranges(argv: list[str]) -> None:
    with pytest.raises(SettingsError, match=argv[0]):
        load_settings(ServeSettings, argv, {})


def test_the_gateway_is_told_what_it_needs() -> None:
    settings = ServeSettings(port=9000, max_model_len=512, files_dir=Path("/files"))
    commands = ChildCommands(settings, split_flags(["--max-num-streams", "5"]), Path("/c.toml"), SOURCE, "unix:///s")
    command = commands.gateway("gateway")
    assert command.environ is not None and command.environ["PAGESTREAM_REDIS_URL"] == "unix:///s"
    assert list(command.argv[1:]) == [
        "-P", "-m", "gateway", "--model", "/m", "--served-model-name", "Model",
        "--drain-seconds", "30.0", "--log-format", "text", "--max-model-len", "512", "--config", "/c.toml",
        "--host", "127.0.0.1", "--port", "9000", "--files-dir", "/files", "--max-num-streams", "5",
    ]  # fmt: skip


def test_several_gateways_share_the_port_and_have_one_each() -> None:
    settings = ServeSettings(gateways=2, served_model_name="name")
    command = ChildCommands(settings, PassedFlags((), ()), None, SOURCE, "u").gateway("gateway-1")
    assert command.name == "gateway-1"
    assert command.argv[-7:-2] == ["--port", "8000", "--reuse-port", "--own-port", "0"]


def test_gateways_of_one_model_share_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    settings = ServeSettings(gateways=2, served_model_name="organisation/../model")
    commands = ChildCommands(settings, PassedFlags((), ()), None, SOURCE, "u")
    for name in ("gateway-0", "gateway-1"):
        folder = "/state/pagestream/files/organisation%2F..%2Fmodel"
        assert commands.gateway(name).argv[-2:] == ["--files-dir", folder]


def test_the_worker_is_told_what_it_needs() -> None:
    commands = ChildCommands(ServeSettings(), split_flags(["--dtype", "float32"]), None, SOURCE, "unix:///s")
    assert list(commands.worker(0, worker_base_id("f", 0, 2)).argv[1:]) == [
        "-P", "-m", "engine_worker", "--model", "/m", "--served-model-name", "Model",
        "--drain-seconds", "30.0", "--log-format", "text", "--worker-id", "serve.f-0-2", "--metrics-port", "0",
        "--dtype", "float32",
    ]  # fmt: skip


def test_no_command_line_shows_the_stores_password() -> None:
    commands = ChildCommands(ServeSettings(), PassedFlags((), ()), None, SOURCE, "redis://u:hidden@host/0")
    words = [*commands.gateway("g").argv, *commands.worker(0, "id").argv]
    assert not [word for word in words if "hidden" in word]


def test_several_workers_share_the_cores_unless_told_otherwise() -> None:
    settings = ServeSettings(workers=64, served_model_name="name")
    shared = ChildCommands(settings, PassedFlags((), ()), None, SOURCE, "u").worker(3, "id")
    assert shared.argv[-2:] == ["--num-threads", "1"]
    told = ChildCommands(settings, split_flags(["--num-threads=2"]), None, SOURCE, "u").worker(3, "id")
    assert [word for word in told.argv if word.startswith("--num-threads")] == ["--num-threads=2"]
    assert shared.name == "worker-3"
