"""The files in .github and the tool configurations are valid and pinned, and call existing commands."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from requirements.lock import PYTHON, PYTHON_TOO
from tests.docs.facts import make_targets

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "request.yml")],
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "dependabot": [GITHUB / "dependabot.yml"],
}


def steps(path: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def commands(path: Path) -> list[str]:
    return [line for step in steps(path) for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_workflow_file_follows_its_schema(schema: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    checked = subprocess.run([*command, *map(str, SCHEMAS[schema])], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_workflow_file_has_a_schema() -> None:
    assert sorted(GITHUB.rglob("*.yml")) == sorted(path for paths in SCHEMAS.values() for path in paths)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_read_only(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_commands_contain_no_untrusted_input(path: Path) -> None:
    """The shell would run a branch or issue name in a command line; such values are passed by environment variables."""
    assert [line for line in commands(path) if "${{" in line] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_commands_exist_in_the_repository(path: Path) -> None:
    made = [name for line in commands(path) for name in re.findall(r"\bmake ([\w-]+)", line)]
    assert set(made) <= make_targets()
    scripts = [line.split()[0] for line in commands(path) if line.startswith(".ci/")]
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


def test_ci_runs_both_suites_on_both_pythons() -> None:
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    assert all(job["strategy"]["matrix"] == {"python": [PYTHON, PYTHON_TOO]} for job in jobs.values())
    lines = commands(GITHUB / "workflows" / "ci.yml")
    assert "make quick PYTHON=python" in lines and ".ci/run" in lines


def test_release_has_the_wheel_and_all_compose_images() -> None:
    jobs = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text())["jobs"]
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
    built = {service["image"]: service["build"] for service in services if "build" in service}
    published = {entry["image"]: entry for entry in jobs["images"]["strategy"]["matrix"]["include"]}
    assert published.keys() == built.keys()
    for image, build in built.items():
        assert published[image]["target"] == build["target"]
        assert published[image]["accelerator"] == build.get("args", {}).get("ACCELERATOR", "cpu")
    assert jobs["wheel"]["needs"] == jobs["images"]["needs"] == "test"


def test_git_hooks_run_what_make_check_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = {hook["entry"].split()[0] for hook in hooks} - {".venv/bin/python"}
    (recipe,) = re.findall(r"(?m)^check: dev\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text())
    assert entries == {f".venv/bin/{name}" for name in re.findall(r"\$\(BIN\)/([\w-]+)", recipe)}
    assert all(hook["language"] == "system" for hook in hooks)  # no hook downloads anything


def test_editorconfig_line_length_matches_ruff() -> None:
    width = re.findall(r"(?m)^line-length = (\d+)$", (ROOT / "pyproject.toml").read_text())
    assert (
        re.findall(
            r"\[\*\.\{py,toml\}\]\nindent_size = 4\nmax_line_length = (\d+)", (ROOT / ".editorconfig").read_text()
        )
        == width
    )
