"""Markers of a test for its requirements, found from its fixtures and the functions that it reaches.

    redis   the session's store           model   the demo model's weights
    e2e     a separate process            gpu     a CUDA device; set by the test itself
    unit    at most the store             quick   none of these, no torch, and no raised time limit

Requirements that are not found cause a failure: a test that starts a process without `e2e` fails (begin()).
"""

import inspect
import os
import platform
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

NEEDS = ("redis", "model", "e2e", "gpu")
STORE_FIXTURE, WEIGHTS_FIXTURE = "valkey_server", "demo_model_dir"
# Paths that `quick` does not import: folders whose tests all start processes; folders with torch, whose import takes
# longer than all quick tests; and files whose tests take seconds each.
NEVER_QUICK = (
    "tests/browser/",
    "tests/faults/",
    "tests/packaging/",
    "tests/monitoring/test_alerts_of_faults.py",
    "tests/monitoring/test_with_prometheus.py",
    "tests/integration/test_protocol_model.py",
    "tests/kernels/",
    "tests/engine_worker/execution/",
    "tests/engine_worker/gguf/",
    "tests/engine_worker/model/",
    "tests/engine_worker/test_chosen_device.py",
    "tests/engine_worker/test_estimate.py",
    "tests/bench/",
    "tests/clients/",
    "tests/e2e/",
    "tests/weights/",
    "tests/engine_worker/scheduling/test_kv_world.py",
    "tests/gateway/batches/test_missing_keys.py",
    "tests/gateway/batches/test_shares.py",
    "tests/gateway/test_loop_is_free.py",
    "tests/gateway/test_no_500.py",
    "tests/gateway/test_spec_bodies.py",
    "tests/shared/test_garbage_collection.py",
)
# A function that contains one of these names starts processes. Functions of the FOLLOWED roots are searched.
STARTERS = frozenset(("subprocess", "multiprocessing", "create_subprocess_exec", "Popen", "_fork_exec"))
FOLLOWED = ("tests", "pagestream", "bench")
STARTS = frozenset(("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"))  # audit events


def mark(item: pytest.Function) -> None:
    needs = {name for name in NEEDS if item.get_closest_marker(name)}
    needs |= {"redis"} if STORE_FIXTURE in item.fixturenames else set()
    needs |= {"model"} if WEIGHTS_FIXTURE in item.fixturenames else set()
    needs |= {"e2e"} if any(starts_a_process(function) for function in _functions(item)) else set()
    kinds = {"unit"} if needs <= {"redis"} else set()
    kinds |= {"quick"} if not needs and not _asks_for_time(item) and is_read(item.path, "quick", item.config) else set()
    for name in sorted(needs | kinds):
        item.add_marker(name)


def _asks_for_time(item: pytest.Item) -> bool:
    """Return whether a test raises its time limit, because it is slow."""
    limit = item.get_closest_marker("timeout")
    return limit is not None and limit.args[0] > float(item.config.getini("timeout"))


def is_read(path: Path, selected: str, config: pytest.Config) -> bool:
    """Return whether a file or folder may contain tests of `selected`, the expression of -m."""
    inside = f"{path.relative_to(config.rootpath).as_posix()}/"
    return selected != "quick" or not inside.startswith(NEVER_QUICK)


def _functions(item: pytest.Function) -> Iterator[Callable[..., Any]]:
    """Yield the test, its parameters, and its fixtures, except the store, which has its own marker."""
    yield item.function
    if hasattr(item, "callspec"):
        yield from (value for value in item.callspec.params.values() if isinstance(value, FunctionType))
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():
        if name not in (STORE_FIXTURE, WEIGHTS_FIXTURE):
            yield from (definition.func for definition in definitions)


@cache
def starts_a_process(function: Callable[..., Any]) -> bool:
    """Return whether a function, or one that it names directly or indirectly, may start a process."""
    seen, todo = set(), [function]
    while todo:
        if (one := todo.pop()) in seen:
            continue
        seen.add(one)
        names, named = _names(one)
        if names & STARTERS:
            return True
        todo += named
    return False


@cache
def _names(function: Callable[..., Any]) -> tuple[frozenset[str], tuple[FunctionType, ...]]:
    """Return the names in a function, and the functions of ours among them."""
    hypothesis = getattr(function, "hypothesis", None)
    plain = inspect.unwrap(hypothesis.inner_test if hypothesis else function)
    if not isinstance(plain, FunctionType):
        return frozenset(), ()
    names = frozenset(name for code in _codes(plain.__code__) for name in code.co_names)
    values = [plain.__globals__[name] for name in names if name in plain.__globals__]
    modules = [value for value in values if isinstance(value, ModuleType) and _is_ours(value.__name__)]
    values += [vars(module)[name] for module in modules for name in names if name in vars(module)]
    return names, tuple(inner for value in values for inner in _functions_of(value))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _functions_of(value: object) -> Iterator[FunctionType]:
    """Yield a function of ours, the methods of a class of ours, or those in a table."""
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _functions_of(item) if callable(item) else ()
    value = inspect.unwrap(value) if callable(value) else value
    if not _is_ours(getattr(value, "__module__", None) or ""):
        return
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, type):
        for member in vars(value).values():
            plain = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            yield from _functions_of(plain) if isinstance(plain, FunctionType) else ()


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in FOLLOWED


_running: list[pytest.Item] = []


def begin(item: pytest.Item) -> None:
    """Attribute process starts to `item` until the next test begins."""
    if not _running:
        platform.processor()  # runs `uname` once per process; OpenAI's client sends it to servers
        sys.addaudithook(_refuse)
    _running[:] = [item]


def _refuse(event: str, arguments: tuple[object, ...], watched: frozenset[str] = STARTS | {"socket.connect"}) -> None:
    if event not in watched:  # a default argument, because module names are deleted before the hook at interpreter exit
        return
    item = _running[0]
    if any(item.get_closest_marker(need) for need in NEEDS):
        return
    if event in STARTS:
        pytest.fail(f"{item.nodeid} starts a process: {arguments[:2]}; mark it e2e, or fix tests/needs.py")
    if _is_a_store(arguments[1]):
        pytest.fail(f"{item.nodeid} uses a store at {arguments[1]!r} without its fixture")


def _is_a_store(address: object) -> bool:
    """Return whether an address is a store's: all stores of tests listen on unix sockets."""
    return isinstance(address, str) and os.path.exists(address)
