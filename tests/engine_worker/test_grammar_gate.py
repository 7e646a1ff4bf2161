"""The grammar gate: only requests with a grammar wait, and a dropped request leaves no state."""

import threading
from collections.abc import Sequence

from engine_worker.engine_thread import EngineThread, Turn
from engine_worker.grammar_gate import GrammarGate
from shared.grammars import GrammarError
from shared.messages import ErrorCode, ErrorEvent, GenerationRequest, Grammar, GrammarKind, StoredChoice
from tests.builders import FakeModelRunner, make_engine, make_request
from tests.engine_worker.worker_harness import eventually
from tests.patience import PATIENCE_SECONDS

GRAMMAR = Grammar(GrammarKind.REGEX, "a")


class SlowCompiler:
    """Blocks in each compilation until `go_on` is set."""

    def __init__(self, problem: str = "") -> None:
        self.go_on = threading.Event()
        self.compiled: list[Grammar] = []
        self._problem = problem

    def __call__(self, grammar: Grammar) -> None:
        assert self.go_on.wait(PATIENCE_SECONDS)
        self.compiled.append(grammar)
        if self._problem:
            raise GrammarError(self._problem)


class Passed:
    def __init__(self) -> None:
        self.ids: list[str] = []
        self.problems: list[str] = []

    def __call__(self, request: GenerationRequest, stored: Sequence[StoredChoice], problem: str) -> None:
        self.ids.append(request.request_id)
        self.problems.append(problem)


async def test_gate_only_requests_with_grammar_wait() -> None:
    compiler, passed = SlowCompiler(), Passed()
    gate = GrammarGate(compiler, passed)
    gate.add(make_request(3, "waits", grammar=GRAMMAR), ())
    gate.add(make_request(3, "free"), ())
    assert passed.ids == ["free"] and gate.num_waiting == 1
    compiler.go_on.set()
    await eventually(lambda: passed.ids == ["free", "waits"])
    assert gate.num_waiting == 0 and compiler.compiled == [GRAMMAR] and passed.problems == ["", ""]


async def test_gate_dropped_request_does_not_pass() -> None:
    compiler, passed = SlowCompiler(), Passed()
    gate = GrammarGate(compiler, passed)
    for request_id in ("one", "two", "three"):
        gate.add(make_request(3, request_id, grammar=GRAMMAR), ())
    assert gate.drop("one") and not gate.drop("one") and not gate.drop("unknown")
    compiler.go_on.set()
    await eventually(lambda: passed.ids == ["two", "three"])
    gate.add(make_request(3, "four", grammar=GRAMMAR), ())
    assert gate.drop_all() == ["four"] and gate.num_waiting == 0


async def test_gate_invalid_grammar_ends_request_with_reason() -> None:
    thread, turns = EngineThread(), list[Turn]()
    compiler = SlowCompiler("a bad regex")
    compiler.go_on.set()
    thread.start(make_engine(FakeModelRunner()), turns.append, compiler)
    thread.add_request(make_request(3, "bad", grammar=GRAMMAR), ())
    await eventually(lambda: len(turns) == 1)
    await thread.stop()
    assert list(turns[0].events) == [ErrorEvent("bad", ErrorCode.INVALID_REQUEST, "grammar: a bad regex")]


async def test_gate_dropped_while_waiting_frees_its_slot() -> None:
    thread, compiler = EngineThread(), SlowCompiler()
    thread.start(make_engine(FakeModelRunner(), max_num_seqs=4), lambda turn: None, compiler)
    assert (await thread.wait_for_demand()).requests == 4
    for request_id in ("one", "two"):
        thread.add_request(make_request(3, request_id, grammar=GRAMMAR), ())
    assert (await thread.wait_for_demand()).requests == 2
    dropped: list[str] = []
    thread.abort_request("one", dropped.append)
    assert dropped == ["one"]
    assert (await thread.wait_for_demand()).requests == 3
    await thread.drop_requests()
    assert (await thread.wait_for_demand()).requests == 4
    compiler.go_on.set()
    await thread.stop()
    assert thread.num_steps == 0
