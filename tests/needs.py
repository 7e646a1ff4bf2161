"""The markers of a test say what it needs beside Python: found in its fixtures and in the functions that it reaches.

    redis   the session's store           model   the demo model's weights
    e2e     a process of its own          gpu     a CUDA device: a test says so itself
    unit    at most the store             quick   nothing of these, nor torch, nor more time than a test has by itself

What is not found here is found when it happens: a test that starts a process all the same fails (`begin`). Where it is
right to start one, it says `e2e` itself.
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
# What `quick` does not even import: folders where each test starts processes; those with torch, whose import takes
# longer than all the tests that do without; and files whose tests are seconds of work each: bodies of 2 MiB in every
# hostile shape, random requests and histories, batches that take turns.
NEVER_QUICK = (
    "tests/browser/",
    "tests/faults/",
    "tests/packaging/",
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
# A function in which one of these names stands starts processes; functions of these roots are followed to find one.
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
    """More than a test gets by itself: it takes long on a slow machine."""
    limit = item.get_closest_marker("timeout")
    return limit is not None and limit.args[0] > float(item.config.getini("timeout"))


def is_read(path: Path, selected: str, config: pytest.Config) -> bool:
    """Whether tests that `selected`, the expression of -m, wants may be in this file or folder."""
    inside = f"{path.relative_to(config.rootpath).as_posix()}/"
    return selected != "quick" or not inside.startswith(NEVER_QUICK)


def _functions(item: pytest.Function) -> Iterator[Callable[..., Any]]:
    """The test, its parameters and its fixtures; the store that a session shares is a need of its own."""
    yield item.function
    if hasattr(item, "callspec"):
        yield from (value for value in item.callspec.params.values() if isinstance(value, FunctionType))
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():
        if name not in (STORE_FIXTURE, WEIGHTS_FIXTURE):
            yield from (definition.func for definition in definitions)


@cache
def starts_a_process(function: Callable[..., Any]) -> bool:
    """Whether it does, or anything that it names, or that those name. What it only may call counts as called."""
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
    """The names in it, and those of them that are functions of ours."""
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
    """A function of ours, or the methods of a class of ours, or those of a table."""
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
    """From here on, until another test begins, a process is started on behalf of `item`."""
    if not _running:
        platform.processor()  # asks `uname`, once in a process: OpenAI's client tells it to servers
        sys.addaudithook(_refuse)
    _running[:] = [item]


def _refuse(event: str, arguments: tuple[object, ...], watched: frozenset[str] = STARTS | {"socket.connect"}) -> None:
    if event not in watched:  # a default: when the interpreter ends, the names of this module are gone before the hook
        return
    item = _running[0]
    if any(item.get_closest_marker(need) for need in NEEDS):
        return
    if event in STARTS:
        pytest.fail(f"{item.nodeid} starts a process: {arguments[:2]}; mark it e2e, or mend tests/needs.py")
    if _is_a_store(arguments[1]):
        pytest.fail(f"{item.nodeid} uses a store at {arguments[1]!r} without its fixture")


def _is_a_store(address: object) -> bool:
    """The session's store, and every other one in this process, listens on a unix socket."""
    return isinstance(address, str) and os.path.exists(address)
