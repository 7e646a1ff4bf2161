"""A request as the store has it: what was asked, how far it is, how it ended. Pure.

What cannot be read is a FormatError.

A takeover's last step here, where a journal is read. It knows no Redis and no stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.messages import (
    FormatError,
    GenerationRequest,
    StoredChoice,
    TerminalEvent,
    decode_request,
    decode_terminal_event,
    journal_choices,
)

STORED_END = ("state", "terminal")  # of the hash {m}:r:<id>
FIELDS = (*STORED_END, "body", "owner", "record", "asked")


@dataclass(frozen=True, slots=True)
class StoredRequest:
    request: GenerationRequest
    state: str  # queued | running | done
    owner_key_hash: str
    record: bytes  # empty for a request that is not kept
    choices: list[StoredChoice]  # by index, as far as they have come
    terminal: TerminalEvent | None
    was_cancelled: bool = False  # by somebody who asked for that, not because its readers had gone

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


def is_missing(stored: Any) -> bool:
    """`stored`: the values of fields that begin with the state, or the server's error."""
    return isinstance(stored, list) and stored[0] is None


def stored_answer(
    request: GenerationRequest, stored: Any, journal: Any, known: Sequence[int] = ()
) -> tuple[list[StoredChoice], TerminalEvent | None]:
    """`stored`: state and terminal event, or the server's error; `journal`: its bytes, None, or the error; `known`: as
    journal_choices() has it."""
    for reply in (stored, journal):
        if isinstance(reply, Exception):
            raise FormatError(str(reply)) from reply
    choices = journal_choices(journal or b"", request.sampling.n, known)
    if stored[0] != b"done":
        return choices, None
    terminal = decode_terminal_event(stored[1] or b"")
    if terminal.request_id != request.request_id:
        raise FormatError(f"the stored end is that of {terminal.request_id}")
    return choices, terminal


def stored_request(fields: Sequence[Any] | Exception, journal: Any) -> StoredRequest | None:
    """None if the store does not have it. `fields`: the values of FIELDS."""
    if isinstance(fields, Exception):
        raise FormatError(str(fields)) from fields
    state, _, body, owner, record, asked = fields
    if body is None:
        return None
    request = decode_request(body)
    choices, terminal = stored_answer(request, fields, journal)
    return StoredRequest(
        request, state.decode(), (owner or b"").decode(), record or b"", choices, terminal, asked is not None
    )
