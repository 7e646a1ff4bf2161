"""The files in .github and .ci are valid and pinned, and call what exists."""

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from requirements.lock import PYTHON, PYTHON_TOO
from shared.version import VERSION
from tests.docs.facts import make_targets

REPOSITORY = "https://github.com/owner/pagestream"
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
    named = re.compile(r"\$\{PAGESTREAM_REGISTRY:-local\}/([\w-]+):\$\{PAGESTREAM_VERSION:-([\d.]+)\}")
    built = {named.sub(r"\1", service["image"]): service["build"] for service in services if "build" in service}
    published = {entry["image"]: entry for entry in jobs["images"]["strategy"]["matrix"]["include"]}
    assert published.keys() == built.keys()
    for image, build in built.items():
        assert published[image]["target"] == build["target"]
        assert published[image]["accelerator"] == build.get("args", {}).get("ACCELERATOR", "cpu")
    assert jobs["wheel"]["needs"] == jobs["images"]["needs"] == "test"


def test_images_have_the_version_of_the_code() -> None:
    kustomizations = (ROOT / "deploy").rglob("kustomization.yaml")
    tags = [tag for path in kustomizations for tag in re.findall(r"newTag: ([^}]+)", path.read_text())]
    tags += re.findall(r"PAGESTREAM_VERSION:-([^}]+)", (ROOT / "docker-compose.yml").read_text())
    assert len(tags) == 10 and set(tags) == {VERSION}


def test_a_release_has_notes_and_manifests_with_its_images(tmp_path: Path) -> None:
    command = [sys.executable, ".ci/release_files", "ghcr.io/owner", REPOSITORY, VERSION, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert "### " in (tmp_path / "notes.md").read_text()
    with tarfile.open(tmp_path / f"pagestream-deploy-{VERSION}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    text = "".join(path.read_text() for path in sorted(tmp_path.rglob("*.y*ml")))
    named = re.findall(r"(?:image: |[nN]ame: )(\S*/pagestream-[\w-]+)", text)
    assert len(named) > 10
    assert {image.rpartition("/")[0] for image in named} == {"ghcr.io/owner", "${PAGESTREAM_REGISTRY:-ghcr.io/owner}"}
    assert not re.findall(r"image: pagestream-", text)
    runbooks = re.findall(r"runbook_url: (\S+)#", text)
    assert len(runbooks) > 30 and set(runbooks) == {f"{REPOSITORY}/blob/v{VERSION}/docs/guides/alerts.md"}
    with tarfile.open(tmp_path / f"pagestream-results-{VERSION}.tar.gz") as archive:
        assert "bench/results/h200/http_cases.json" in archive.getnames()


def test_changelog_fragments_have_a_known_type() -> None:
    kinds = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    endings = tuple(f".{kind['directory']}.md" for kind in kinds)
    fragments = {path.name for path in (ROOT / "changes").iterdir()} - {"README.md", "template.md.jinja"}
    assert [name for name in sorted(fragments) if not name.endswith(endings)] == []


def test_a_version_without_notes_is_no_release(tmp_path: Path) -> None:
    command = [sys.executable, ".ci/release_files", "ghcr.io/owner", REPOSITORY, "9.9.9", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 1 and "CHANGELOG.md has no section 9.9.9" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_hooks_run_what_make_check_runs() -> None:
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
