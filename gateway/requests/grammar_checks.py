"""Refuses grammars that no worker could follow, before anything is queued.

The worst ones take 0.5 s, so it is done off the event loop, in one thread for all: a client that sends hard grammars
waits behind its own, and nothing but other grammars does.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from gateway.errors import InvalidRequest
from gateway.requests.grammar_fields import AskedGrammar
from shared.grammars import GrammarError, check_grammar
from shared.messages import GrammarKind


class GrammarChecks:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammars")

    async def check(self, asked: AskedGrammar | None) -> None:
        """Raises InvalidRequest, with what is wrong in llguidance's words."""
        if asked is None:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, check_grammar, asked.grammar)
        except GrammarError as error:
            code = "invalid_json_schema" if asked.grammar.kind is GrammarKind.JSON_SCHEMA else "invalid_grammar"
            raise InvalidRequest(f"{asked.param}: {error}.", param=asked.param, code=code) from error
