"""Settings: precedence, origins, and errors that name the source of a wrong value."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.settings import (
    SettingsError,
    build_parser,
    load_settings,
    options,
    parse_bytes,
    parse_count,
    setting,
    settings_or_exit,
)


@dataclass(frozen=True, kw_only=True)
class Example:
    model: Path = setting(help="directory")
    block_size: int = setting(16, help="tokens in a block", choices=(8, 16, 32, 64))
    memory_bytes: int | None = setting(None, help="size", parse=parse_bytes, aliases=("--memory",))
    ratio: float = setting(0.5, help="share, in %")
    warm_up: bool = setting(True, help="run once before the first request")
    api_key: str = setting("", help="key", secret=True)
    names: tuple[str, ...] = setting((), help="names")

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"--ratio: expected over 0 and at most 1, got {self.ratio}")


def load(*argv: str, environ: dict[str, str] | None = None, prog: str = "pagestream worker"):
    return load_settings(Example, ["--model", "/m", *argv], environ or {}, prog=prog)


def test_settings_ignore_the_link_to_a_service_of_the_same_name() -> None:
    # Kubernetes sets it in all pods beside a service that is named pagestream-block-size.
    assert load(environ={"PAGESTREAM_BLOCK_SIZE": "tcp://10.0.0.9:80"}).origins["block_size"] == "default"


def test_settings_defaults_have_origin_default() -> None:
    loaded = load()
    assert loaded.settings == Example(model=Path("/m"))
    assert loaded.origins == {
        "model": "flag", "block_size": "default", "memory_bytes": "default", "ratio": "default",
        "warm_up": "default", "api_key": "default", "names": "default",
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Composed:
    example: Example
    port: int = setting(80, help="port")


def test_settings_part_options_belong_to_program(tmp_path: Path) -> None:
    file = tmp_path / "pagestream.toml"
    file.write_text("ratio = 0.25\n")
    argv = ["--model", "/m", "--port", "1", "--no-warm-up", "--config", str(file)]
    loaded = load_settings(Composed, argv, {"PAGESTREAM_BLOCK_SIZE": "8"}, prog="x")
    assert loaded.settings == Composed(
        example=Example(model=Path("/m"), block_size=8, ratio=0.25, warm_up=False), port=1
    )
    assert [loaded.origins[name] for name in ("model", "block_size", "names")] == [
        "flag", "env PAGESTREAM_BLOCK_SIZE", "default",
    ]  # fmt: skip
    assert [option.name for option in options(Composed)] == [*(option.name for option in options(Example)), "port"]
    assert "--ratio" in build_parser(Composed, "x").format_help()


def test_settings_part_wrong_value_is_named() -> None:
    with pytest.raises(SettingsError, match="--ratio: expected over 0 and at most 1"):
        load_settings(Composed, ["--model", "/m", "--ratio", "2"], {}, prog="x")
    with pytest.raises(SettingsError, match="--model: a value is required"):
        load_settings(Composed, [], {}, prog="x")


def test_settings_parts_with_same_option_are_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twins:
        example: Example
        ratio: float = setting(0.5, help="share")

    with pytest.raises(TypeError, match="Twins has ratio twice"):
        options(Twins)


@pytest.mark.parametrize("words", [("a,b",), ("a", "b"), ("a,", "b")])
def test_settings_list_accepts_commas_or_spaces(words: tuple[str, ...]) -> None:
    loaded = load("--names", *words, "--ratio", "0.25")
    assert (loaded.settings.names, loaded.settings.ratio) == (("a", "b"), 0.25)


def test_settings_flag_precedes_environment_precedes_file(tmp_path: Path) -> None:
    file = tmp_path / "pagestream.toml"
    file.write_text('block_size = 8\nratio = 0.25\nnames = ["a", "b"]\n[worker]\nmemory-bytes = "1K"\nratio = 0.75\n')
    loaded = load(
        "--block-size", "64", "--config", str(file),
        environ={"PAGESTREAM_BLOCK_SIZE": "32", "PAGESTREAM_WARM_UP": "off", "PAGESTREAM_NAMES": ""},
    )  # fmt: skip
    assert loaded.settings == Example(
        model=Path("/m"), block_size=64, memory_bytes=1024, ratio=0.75, warm_up=False, names=("a", "b")
    )
    assert loaded.origins["block_size"] == "flag"
    assert loaded.origins["warm_up"] == "env PAGESTREAM_WARM_UP"
    assert loaded.origins["ratio"] == f"file {file}"
    assert load(environ={"PAGESTREAM_CONFIG": str(file)}, prog="pagestream gateway").settings.ratio == 0.25


def test_settings_booleans_have_two_flags_sizes_have_aliases() -> None:
    assert load("--no-warm-up").settings.warm_up is False
    assert load("--warm-up", environ={"PAGESTREAM_WARM_UP": "0"}).settings.warm_up is True
    assert load("--memory", "2k").settings.memory_bytes == 2000


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--block-size", "12"], {}, "--block-size"),
        (["--block-size", "many"], {}, "--block-size"),
        (["--memory-bytes", "4X"], {}, "--memory-bytes"),
        (["--ratio", "2"], {}, "--ratio"),
        (["--block", "16"], {}, "--block"),
        (["--unknown"], {}, "--unknown"),
        ([], {"PAGESTREAM_WARM_UP": "perhaps"}, "PAGESTREAM_WARM_UP"),
        ([], {"PAGESTREAM_RATIO": "half"}, "PAGESTREAM_RATIO"),
        (["--config", "/nowhere.toml"], {}, "--config /nowhere.toml"),
    ],
)
def test_settings_wrong_value_names_its_source(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        load(*argv, environ=environ)


def test_settings_required_value_missing_is_refused() -> None:
    with pytest.raises(SettingsError, match="--model: a value is required"):
        load_settings(Example, [], {})


@pytest.mark.parametrize("content", ["blocksize = 8", "[worker]\nblocksize = 8"])
def test_settings_unknown_key_in_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(content)
    with pytest.raises(SettingsError, match="worker has no setting blocksize"):
        load("--config", str(file))


def test_settings_tables_of_other_programs_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("block_size = 8\n[gateway]\nport = 80\n")
    assert load("--config", str(file)).settings.block_size == 8


def test_show_config_prints_origin_and_hides_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_settings(Example, ["--show-config", "json"], {"PAGESTREAM_API_KEY": "s3cret"}, prog="x")
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert "s3cret" not in shown
    assert json.loads(shown)["api_key"] == {"value": "***", "origin": "env PAGESTREAM_API_KEY"}
    assert json.loads(shown)["model"] == {"value": "(required)", "origin": "default"}
    with pytest.raises(SystemExit):
        load("--show-config", "--block-size", "8")
    assert "block_size    8     flag\n" in capsys.readouterr().out


def test_settings_or_exit_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        settings_or_exit(Example, ["--model", "/m", "--ratio", "x"], {}, prog="pagestream worker")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "pagestream worker: error: --ratio: expected a number, got 'x'\n"


def test_help_shows_defaults_and_choices() -> None:
    text = build_parser(Example, "x").format_help()
    assert "{8,16,32,64}" in text
    assert "(default: 16)" in text
    assert "share, in %" in text


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("4G", 4 * 2**30), ("4g", 4 * 10**9), ("1.5GiB", 3 * 2**29), ("512MB", 512 * 10**6), ("1K", 1024)],
)
def test_parse_bytes_accepts_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(("text", "count"), [("7", 7), ("16k", 16_000), ("16K", 16_384), ("1m", 1_000_000)])
def test_parse_count_accepts_units(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "-1", "4 GB of it", "1e3", "4GB"])
def test_parse_count_invalid_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number such as"):
        parse_count(text)


def test_settings_import_is_light() -> None:
    code = "import sys, shared.settings; print(sorted({'torch', 'asyncio', 'redis', 'logging'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("rediss://gateway:s3cret@host:6380/0?ssl_ca_certs=/ca.pem", "rediss://gateway:***@host:6380/0?ssl_ca_certs=/ca.pem"),
        ("redis://:p@ss@host", "redis://:***@host"),
        ("redis://gateway@redis:6379/0", "redis://gateway@redis:6379/0"),
        ("unix:///run/valkey.sock", "unix:///run/valkey.sock"),
    ],
)  # fmt: skip
def test_show_config_hides_password_in_url(capsys: pytest.CaptureFixture[str], url: str, shown: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        redis_url: str = setting("", help="the store")

    with pytest.raises(SystemExit):
        load_settings(Settings, ["--redis-url", url, "--show-config", "json"], {})
    assert json.loads(capsys.readouterr().out)["redis_url"]["value"] == shown
