"""Holds requests with a grammar until it is compiled, so that no engine step waits for it.

    gate.add(request, stored)     compile in a separate thread, then pass the request on
    gate.drop(request_id)         do not pass it on

A request without a grammar passes at once; one whose grammar cannot be compiled passes with the error. Compilation has
its own limits (shared/grammars.py), so the thread never hangs. Use it in the event loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from shared.messages import GenerationRequest, Grammar, StoredChoice

Compile = Callable[[Grammar], object]
PassOn = Callable[[GenerationRequest, Sequence[StoredChoice], str], None]  # the last: an error, or ""


class GrammarGate:
    """The requests whose grammars are being compiled."""

    def __init__(self, compile_grammar: Compile, pass_on: PassOn) -> None:
        """Create the gate. Requires a running event loop."""
        self._compile = compile_grammar
        self._pass_on = pass_on
        # One thread bounds the memory of compilation; most grammars take 1 ms.
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._waiting: dict[str, asyncio.Task[None]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: GenerationRequest, stored: Sequence[StoredChoice]) -> None:
        if request.sampling.grammar is None:
            self._pass_on(request, stored, "")
        else:
            task = asyncio.create_task(self._compile_and_pass_on(request, stored, request.sampling.grammar))
            self._waiting[request.request_id] = task

    def drop(self, request_id: str) -> bool:
        """Forget a request. Return whether it was waiting here."""
        task = self._waiting.pop(request_id, None)
        if task is not None:
            task.cancel()
        return task is not None

    def drop_all(self) -> list[str]:
        """Forget the requests that were waiting here, and return their ids."""
        return [request_id for request_id in list(self._waiting) if self.drop(request_id)]

    async def _compile_and_pass_on(
        self, request: GenerationRequest, stored: Sequence[StoredChoice], grammar: Grammar
    ) -> None:
        compiling = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, grammar)
        await asyncio.wait((compiling,))
        error = compiling.exception()
        del self._waiting[request.request_id]
        self._pass_on(request, stored, f"grammar: {error}" if error is not None else "")
