"""What linters say of the Dockerfile and of what is deployed as YAML: nothing."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# No `---` before a file's only document; two spaces before a comment, as in the Python files.
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


def test_the_dockerfile() -> None:
    lint("hadolint", "--no-color", "Dockerfile")


def test_the_yaml_files() -> None:
    files = [
        str(file) for folder in ("monitoring", "deploy", ".github") for file in sorted((ROOT / folder).rglob("*.y*ml"))
    ]
    assert len(files) > 15
    lint("yamllint", "--strict", "-d", YAML_RULES, "docker-compose.yml", ".pre-commit-config.yaml", *files)
