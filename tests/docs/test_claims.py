"""Pages agree with the code on routes, errors, store names, commands, flags, files, metrics and models.

Every check finds a planted falsehood. Pages that must be complete are complete.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_worker.model.architectures import MODULES
from tests.docs import claims, facts

PAGES = [
    *(facts.ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md") if (facts.ROOT / name).exists()),
    *sorted((facts.ROOT / "docs").rglob("*.md")),
]
INTERNALS = facts.ROOT / "docs" / "internals"


@pytest.mark.parametrize("check", claims.CHECKS, ids=lambda check: check.__name__)
def test_pages_have_no_false_claims(check: Callable[[str], list[str]]) -> None:
    assert false_claims(PAGES, check) == {}


def false_claims(pages: list[Path], check: Callable[[str], list[str]]) -> dict[str, list[str]]:
    found = {str(path): check(path.read_text()) for path in pages}
    return {name: false for name, false in found.items() if false}


def test_a_false_flag_in_a_nested_page_is_found(tmp_path: Path) -> None:
    shutil.copytree(facts.ROOT / "docs", tmp_path / "docs")
    page = tmp_path / "docs" / "guides" / "docker.md"
    page.write_text(page.read_text() + "\nUse `--no-such-flag`.\n")
    pages = sorted((tmp_path / "docs").rglob("*.md"))
    assert false_claims(pages, claims.false_flags) == {str(page): ["--no-such-flag"]}
    assert [path for path in PAGES if path.parts[-2:] == page.parts[-2:]] == [facts.ROOT / "docs/guides/docker.md"]


NOT_THERE = "## Not there, and why\n| vLLM | `/v1/models`, `/tokenize` with `content` | no |\n"
PLANTED = [
    ("see `/v1/chats`", claims.false_routes, ["/v1/chats"]),
    ("`PUT /v1/files/ID` does", claims.false_routes, ["PUT /v1/files/{}"]),
    (NOT_THERE, claims.routes_that_are_there, ["/v1/models"]),
    ("- `/api/embed` answers 404", claims.false_statuses, ["/api/embed 404"]),
    ("then 504 `queue_timeout`", claims.false_statuses, ["504 queue_timeout"]),
    ("**ACCEPT** and **GIVE**, in `emits.lua`", claims.false_scripts, ["emits", "give"]),
    ("`{m}:w:<wid>`, `{m}:worker:<wid>`", claims.false_store_names, ["{m}:worker:*"]),
    ("`pagestream start` or `make install`", claims.false_commands, ["pagestream start", "make install"]),
    ("`python -m bench speed`", claims.false_commands, ["bench speed"]),
    ("```\npython -m bench.papers\n```\n", claims.false_commands, ["python -m bench.papers"]),
    ("`--max-num-sequences`", claims.false_flags, ["--max-num-sequences"]),
    ("```\npagestream serve --gpu 1 --port 9\n```\n", claims.false_flags, ["--gpu"]),
    ("`gateway/store/test_none.py`, `test_pages.py::test_none`", claims.false_files,
     ["gateway/store/test_none.py", "test_pages.py::test_none"]),
    ("`tests/unit/`", claims.false_files, ["tests/unit/"]),
    ("## Layout\n```\ngateway/  HTTP\n  app.py main.py    the root\n```\n", claims.false_layout, ["gateway/main.py"]),
    ("`pagestream_kv_blocks_free` rises", claims.false_metrics, ["pagestream_kv_blocks_free"]),
    ("ADRs 0001, 0003 and 9000", claims.false_decisions, ["ADR 9000"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "check", "found"), PLANTED, ids=[plant[0][:40] for plant in PLANTED])
def test_planted_falsehoods_are_found(text: str, check: Callable[[str], list[str]], found: list[str]) -> None:
    assert check(text) == found


def test_refused_and_missing_families_are_found() -> None:
    rows = "| Llama | yes | Falcon | |\n| Qwen3 | yes | | |\n"
    found = claims.false_families(f"## Models\n| family | GGUF | family | GGUF |\n|---|---|---|---|\n{rows}")
    assert found[0] == "Falcon"
    assert "not named: Mistral" in found


def test_every_check_has_a_planted_falsehood() -> None:
    assert {check for _, check, _ in PLANTED} | {claims.false_families} == set(claims.CHECKS)


def test_many_claims_are_checked() -> None:
    """A pattern that matches nothing would find nothing."""
    text = "\n".join(path.read_text() for path in PAGES)
    assert len(list(claims.named_routes(text))) > 40
    assert len(re.findall(r"\b[45]\d\d `[a-z]+_\w+`", text)) > 10
    assert len(claims.spans(text)) > 1000


def test_every_family_has_a_name() -> None:
    """Add a new family to README.md and to FAMILY_NAMES."""
    kinds = set(claims.FAMILY_NAMES.values()) | {"glm"}  # GLM-4 has two model types
    assert kinds == set(MODULES)


def test_the_store_protocol_page_is_complete() -> None:
    text = (INTERNALS / "store-protocol.md").read_text()
    documented = {re.sub(r"<[^>]+>", "*", name) for name in re.findall(r"\{m\}:(?:[\w:-]|<[^>]+>)+", text)}
    classes = {name for name in facts.redis_names() if re.fullmatch(r"\{m\}:q:\w+", name)}  # `q:<class>` is all of them
    assert facts.redis_names() - classes - documented == set()
    scripts = {name.lower() for name in re.findall(r"\*\*([A-Z]{3,})\*\*", text)}
    assert facts.scripts() - scripts == set()


def test_every_command_is_on_a_page() -> None:
    text = "\n".join(path.read_text() for path in PAGES if path.parent.name != "adr")
    assert [name for name in sorted(facts.commands()) if f"pagestream {name}" not in text] == []


def test_the_layout_has_every_package() -> None:
    layout = (INTERNALS / "index.md").read_text().split("## Layout")[1].split("## ")[0]
    packages = {name.removesuffix("/__init__.py") for name in facts.files() if name.endswith("/__init__.py")}
    named = set(re.findall(r"\b(\w+)/", layout))
    assert {name for name in packages if Path(name).name not in named} == set()


def test_every_raised_error_code_is_on_the_errors_page() -> None:
    rows = re.findall(r"(?m)^\| (\d{3}) \| ([^|]+) \|", (facts.ROOT / "docs" / "reference" / "errors.md").read_text())
    documented = {(int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert facts.raised_codes() - documented == set()
    known = {(status, code) for status, codes in facts.error_codes().items() for code in codes}
    assert documented - known == set()


def test_raised_errors_are_in_the_tree_of_errors() -> None:
    """gateway/errors.py starts with every status and its codes."""
    documented = {(status, code) for status, codes in facts.error_codes().items() for code in codes}
    assert facts.raised_codes() - documented == set()
