"""Linters report nothing for the Dockerfile and the deployed YAML files."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Files with one document have no `---`; comments have two spaces before them, as in Python.
YAML_RULES = """
extends: default
rules:
  document-start: disable
  line-length: {max: 140}
  braces: {max-spaces-inside: 0}
  truthy: {check-keys: false}  # `on` of a workflow
"""


def lint(program: str, *arguments: str) -> None:
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_passes_on_the_dockerfile() -> None:
    lint("hadolint", "--no-color", "Dockerfile")


def test_yamllint_passes() -> None:
    files = [
        str(file) for folder in ("monitoring", "deploy", ".github") for file in sorted((ROOT / folder).rglob("*.y*ml"))
    ]
    assert len(files) > 15
    lint("yamllint", "--strict", "-d", YAML_RULES, "docker-compose.yml", ".pre-commit-config.yaml", *files)
