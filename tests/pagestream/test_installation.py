"""Missing extras are named, and so is a foreign package with one of our names."""

import subprocess
import sys
from pathlib import Path

import pytest

from pagestream import cli, installation
from pagestream.doctor import check_packages
from pagestream.installation import HOME, PACKAGES, foreign_packages, missing_message

REQUIRES = [
    "redis>=8.1",
    'aiohttp>=3; extra == "gateway"',
    'absent-too>=1; extra == "gateway"',
    'no-such-package<3,>=2; extra == "engine"',
    'other-absent; sys_platform == "linux" and extra == "engine"',  # of another platform: ignored
]


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return an environment whose extras name distributions that are not installed."""
    monkeypatch.setattr(installation, "_requirements", lambda: REQUIRES)


def test_missing_extra_is_named_with_its_install_command(lacking: None) -> None:
    assert missing_message("engine") == "no-such-package not installed: pip install 'pagestream[engine]'"
    message = "absent-too, no-such-package not installed: pip install 'pagestream[serve]'"
    assert missing_message("serve", "gateway", "engine") == message
    assert missing_message("embedded") == ""


@pytest.mark.parametrize(
    ("command", "lack"),
    [("serve", "absent-too, no-such-package"), ("gateway", "absent-too"), ("worker", "no-such-package")],
)
def test_command_without_its_extra_names_it(
    lacking: None, command: str, lack: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command]) == 2
    assert capsys.readouterr().err.startswith(f"pagestream {command}: error: {lack} not installed: pip install")


def test_own_packages_raise_no_warning() -> None:
    assert foreign_packages() == []
    (finding,) = check_packages()
    assert finding.status == "ok"
    assert str(HOME) in finding.message


def test_foreign_distribution_with_our_name_is_reported() -> None:
    (foreign,) = foreign_packages({"kernels": ["kernels", "pagestream"], "shared": ["pagestream"]})
    assert "kernels also installs a package `kernels`" in foreign.message
    assert foreign.hint.startswith("pip uninstall kernels; pip install --force-reinstall --no-deps pagestream")


def test_folder_that_shadows_ours_is_reported(tmp_path: Path) -> None:
    """A new Python is started, because this one has found our package already."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").touch()
    code = f"""
import sys
import pagestream.installation as installation
sys.path.insert(0, {str(tmp_path)!r})
print(*[foreign.message for foreign in installation.foreign_packages({{}})], sep="\\n")
"""
    message = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HOME).stdout
    assert message == f"the package `shared` is {tmp_path / 'shared'}, expected {HOME / 'shared'}\n"


def test_every_package_of_the_wheel_is_checked() -> None:
    assert sorted(PACKAGES) == list(PACKAGES)
    assert all((HOME / name / "__init__.py").is_file() for name in PACKAGES)
