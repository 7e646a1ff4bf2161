"""Architecture rules across modules: imports, options, names, dangerous calls, and sizes.

The import contracts are in pyproject.toml.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from engine_worker.settings import WorkerSettings
from gateway.batches.driver.settings import DriverSettings
from gateway.settings import GatewaySettings
from pagestream.serve_settings import GATEWAY_FLAGS, SET_BY_SERVE, ServeSettings
from shared import setting_names
from shared.settings import options

ROOT = Path(__file__).parents[1]
PACKAGES = ("gateway", "engine_worker", "kernels", "shared", "pagestream", "bench")
# Calls that run code from data. All data between processes is MessagePack, JSON, TOML, or safetensors.
DANGEROUS_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# A gateway and its child processes, through private pipes: no byte of a client is unpickled.
PICKLES_TO_ITSELF = {("gateway/work/reader_process.py", "pickle")}
DANGEROUS_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load", "yaml.load"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def source_files() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (ROOT / package).rglob("*.py")


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    command = [str(program), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_import_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("shared/logs.py", "import torch", "No torch where tokens and text are handled"),
        ("gateway/settings.py", "import engine_worker.settings", "meet only in Redis"),
        ("engine_worker/scheduling/policy.py", "import redis", "No network and no metrics"),
        ("engine_worker/execution/step/memory.py", "import engine_worker.scheduling.scheduler", "is the only link"),
        ("engine_worker/execution/sampling/sampler.py", "import engine_worker.kv.sequence", "is the only link"),
        ("gateway/apis/models/routes.py", "import gateway.apis.chat.schema", "An API imports no other API"),
        ("gateway/pipeline/kept.py", "import gateway.apis.registry", "The pipeline names no API"),
        ("gateway/batches/storage/disk.py", "import gateway.errors", "files and batches imports only shared"),
        ("gateway/http/admin.py", "import gateway.batches.driver.driver", "Nothing else imports the batch driver"),
        ("kernels/rms_norm.py", "import shared.messages", "kernels is torch and triton only"),
    ],
)
def test_forbidden_import_breaks_its_contract(tmp_path: Path, file: str, line: str, contract: str) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / file).open("a") as source:
        source.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    broken = [text for text in done.stdout.splitlines() if text.endswith("BROKEN")]
    assert done.returncode == 1
    assert any(contract in text for text in broken), done.stdout


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (ServeSettings, setting_names.SERVE),
        (GatewaySettings, setting_names.GATEWAY),
        (DriverSettings, setting_names.BATCHES),
        (WorkerSettings, setting_names.WORKER),
    ],
)
def test_options_match_the_list(settings: type, names: str) -> None:
    assert [field.name for field in options(settings)] == names.split()


def test_serve_passes_each_gateway_flag_to_the_gateway() -> None:
    of_serve, of_gateway, of_worker = (
        {"--" + field.name.replace("_", "-") for field in options(settings)}
        for settings in (ServeSettings, GatewaySettings, WorkerSettings)
    )
    assert of_gateway - of_worker - of_serve - SET_BY_SERVE == GATEWAY_FLAGS
    # An option of both programs must be one of serve too, or serve would pass it to the workers only.
    assert of_gateway & of_worker - of_serve == SET_BY_SERVE & of_gateway & of_worker


# A model family is one file: no other code depends on a family, or is named after one.
FAMILY_WORDS = re.compile(r"model_type|qwen|llama|gemma|mistral|granite|olmo", re.IGNORECASE)
FAMILY_FILES = (
    "engine_worker/model/architectures/",
    "engine_worker/model/transformers_backend/library.py",  # looks up the model type in the library's table
    "engine_worker/gguf/",  # architecture names of GGUF
)


def test_only_family_files_name_a_family() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in ("engine_worker", "kernels")
        for path in (ROOT / package).rglob("*.py")
        if not str(path.relative_to(ROOT)).startswith(FAMILY_FILES)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if FAMILY_WORDS.search(line)
    ]
    assert found == []


# Device code may import only the batch of scheduling, and model code nothing of it.
LINKS_TO_SCHEDULING = {
    "execution": {"engine_worker.scheduling.batch"},
    "model": set(),
}


@pytest.mark.parametrize("package", LINKS_TO_SCHEDULING)
def test_device_code_imports_only_the_batch_of_scheduling(package: str) -> None:
    imported = {
        name
        for path in (ROOT / "engine_worker" / package).rglob("*.py")
        for name in imports(path.read_text())
        if name.startswith("engine_worker.scheduling")
    }
    assert imported == LINKS_TO_SCHEDULING[package]


def imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def test_package_name_kernels_is_not_taken() -> None:
    """Check that no other package `kernels` is installed: transformers would import it, and both would break."""
    assert packages_distributions()["kernels"] == ["pagestream"]
    (docstring,) = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr)


def test_no_package_shadows_a_name_under_tests() -> None:
    assert [path for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_no_call_runs_code_from_data() -> None:
    found = [(path, *danger) for path in source_files() for danger in dangers(tree_of(path))]
    assert {(str(path.relative_to(ROOT)), what) for path, _, what in found} == PICKLES_TO_ITSELF


@pytest.mark.parametrize(
    "source", ["import pickle", "from pickle import loads", "eval('1')", "torch.load('x')", "np.load('x')"]
)
def test_dangerous_call_is_found(source: str) -> None:
    assert len(list(dangers(ast.parse(source)))) == 1


def dangers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in DANGEROUS_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in DANGEROUS_MODULES:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in DANGEROUS_CALLS:
            yield node.lineno, ast.unparse(node.func)


MAX_FUNCTION_LINES = 50
MAX_COMPLEXITY_EXEMPTIONS = 3  # kernels of one function


@pytest.mark.parametrize("package", ["gateway", "shared"])
def test_subclasses_use_no_private_state_of_libraries(package: str) -> None:
    """SLF001 does not see it, because a subclass says `self`."""
    for module in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
        importlib.import_module(module.name)
    found = {cls.__qualname__: shared for cls in subclasses(object) if (shared := private_of_libraries(cls, package))}
    assert found == {}


def test_private_state_of_a_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_library.py").write_text(
        "class Base:\n    def __init__(self): self._a, self.b = 1, 2\n    def _c(self): ..."
    )
    own = "from a_library import Base\nclass {}(Base):\n    def get(self): return {}\n"
    (tmp_path / "own_code.py").write_text(
        own.format("A", "self._a") + own.format("B", "self.b") + own.format("C", "self._c()")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(folder))
    own_code = importlib.import_module("own_code")
    assert [private_of_libraries(getattr(own_code, name), "own_code") for name in "ABC"] == [{"_a"}, set(), {"_c"}]


def subclasses(cls: type) -> Iterator[type]:
    child: type
    for child in type.__subclasses__(cls):
        yield child
        yield from subclasses(child)


def private_of_libraries(cls: type, package: str) -> frozenset[str]:
    """Return the names with one underscore that a class of our package uses and a base from site-packages defines."""
    if str(cls.__module__).partition(".")[0] != package:
        return frozenset()
    bases = [
        base for base in cls.__mro__ if "site-packages" in (getattr(sys.modules[base.__module__], "__file__", "") or "")
    ]
    return private_names(cls) & {name for base in bases for name in private_names(base) | vars(base).keys()}


@cache
def private_names(cls: type) -> frozenset[str]:
    """Return the names with one underscore of `self`'s attributes and of the methods in a class's source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # made by a decorator or in C
        return frozenset()
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            names.add(node.attr)
    return frozenset(name for name in names if name.startswith("_") and not name.startswith("__"))


def test_functions_outside_kernels_are_short() -> None:
    paths = [path for path in source_files() if path.relative_to(ROOT).parts[0] != "kernels"]
    long = {
        f"{path.relative_to(ROOT)}::{function.name}": lines_of(function)
        for path in paths
        for function in ast.walk(tree_of(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in long.items() if lines > MAX_FUNCTION_LINES} == {}


def test_complexity_exemptions_are_few() -> None:
    """Count exemptions from Ruff's limits: complexity 10, 8 arguments, 50 statements."""
    exempt = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (*source_files(), *(ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"noqa:.*(C901|PLR09)", line) and path != Path(__file__)
    ]
    assert len(exempt) <= MAX_COMPLEXITY_EXEMPTIONS, exempt
    assert [place for place in exempt if not place.startswith("kernels/")] == []


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines without the docstring, so that no argument stays undocumented for its length."""
    assert function.end_lineno is not None
    docstring = function.body[0] if ast.get_docstring(function) else None
    documented = docstring.end_lineno - docstring.lineno + 1 if docstring and docstring.end_lineno else 0
    return function.end_lineno - function.lineno + 1 - documented
