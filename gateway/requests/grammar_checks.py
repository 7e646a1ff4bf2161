"""Refuses grammars that no worker could follow, before anything is queued. Blocking: the worst ones take half a
second, without the interpreter's lock.
"""

from gateway.errors import InvalidRequest
from gateway.requests.grammar_fields import AskedGrammar
from shared.grammars import GrammarError, check_grammar
from shared.messages import GrammarKind


def check_asked(asked: AskedGrammar | None) -> None:
    """Raises InvalidRequest, with what is wrong in llguidance's words."""
    if asked is None:
        return
    try:
        check_grammar(asked.grammar)
    except GrammarError as error:
        code = "invalid_json_schema" if asked.grammar.kind is GrammarKind.JSON_SCHEMA else "invalid_grammar"
        raise InvalidRequest(f"{asked.param}: {error}.", param=asked.param, code=code) from error
