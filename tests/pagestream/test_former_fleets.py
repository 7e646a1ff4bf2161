"""A killed `serve` leaves a file without a lock, which names its fleet."""

import subprocess
import sys
from pathlib import Path

import pytest

from pagestream.former_fleets import FleetFiles
from pagestream.serve_settings import PassedFlags
from tests.patience import PATIENCE_SECONDS

HOLDER = """
import sys, time
from pathlib import Path
from pagestream.former_fleets import FleetFiles
with FleetFiles(Path(sys.argv[1]), "url", "m").hold("f1"):
    print("held", flush=True)
    time.sleep(3600)
"""


def test_killed_fleet_is_found_and_a_running_one_is_not(tmp_path: Path) -> None:
    files = FleetFiles(tmp_path / "fleets", "url", "m")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(files.directory)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    assert files.dead() == []
    holder.kill()
    holder.communicate(timeout=PATIENCE_SECONDS)
    with files.hold("f2"):
        assert files.dead() == ["f1"]
        files.forget("f1")
        assert files.dead() == []


@pytest.mark.parametrize(("url", "model_name"), [("other", "m"), ("url", "other")])
def test_fleets_of_another_store_or_model_are_ignored(tmp_path: Path, url: str, model_name: str) -> None:
    with FleetFiles(tmp_path, "url", "m").hold("f1"):
        pass
    assert FleetFiles(tmp_path, "url", "m").dead() == ["f1"]
    assert FleetFiles(tmp_path, url, model_name).dead() == []


@pytest.mark.parametrize(
    ("flags", "environ", "config", "expected"),
    [
        ((), {}, "", "auto"),
        (("--load-format", "dummy"), {"PAGESTREAM_LOAD_FORMAT": "auto"}, "", "dummy"),
        (("--load-format=dummy",), {}, "", "dummy"),
        ((), {"PAGESTREAM_LOAD_FORMAT": "dummy"}, "", "dummy"),
        ((), {}, 'load-format = "dummy"', "dummy"),
        ((), {}, '[worker]\nload_format = "dummy"', "dummy"),
    ],
)
def test_load_format_is_found_where_workers_find_it(
    tmp_path: Path, flags: tuple[str, ...], environ: dict[str, str], config: str, expected: str
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(config)
    assert PassedFlags((), flags).load_format(environ, path) == expected
