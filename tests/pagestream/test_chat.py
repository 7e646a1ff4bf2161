"""`pagestream chat`: conversations with a scripted server, and the parsing of a real server's bytes."""

import io
from collections.abc import Iterator

import pytest

from pagestream.chat import ChatError, Conversation, Message, _pieces


class Script:
    def __init__(self, *pieces: str | BaseException) -> None:
        self.pieces = pieces
        self.asked: list[list[Message]] = []

    def __call__(self, messages: list[Message]) -> Iterator[str]:
        self.asked.append(messages)
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece


def test_conversation_continues_and_can_restart() -> None:
    script, output = Script("It ", "is."), io.StringIO()
    conversation = Conversation(script, output)
    for line in ("one", "", "two", "/reset", "three", "/system be terse", "four"):
        conversation.take(line)
    one, answer = {"role": "user", "content": "one"}, {"role": "assistant", "content": "It is."}
    assert script.asked == [
        [one],
        [one, answer, {"role": "user", "content": "two"}],
        [{"role": "user", "content": "three"}],
        [{"role": "system", "content": "be terse"}, {"role": "user", "content": "four"}],
    ]
    assert output.getvalue() == "It is.\n" * 4


def test_interrupted_answer_keeps_its_received_text() -> None:
    output = io.StringIO()
    conversation = Conversation(Script("It ", KeyboardInterrupt()), output)
    conversation.take("hi")
    assert conversation.messages[-1] == {"role": "assistant", "content": "It "}
    assert output.getvalue() == "It  [stopped]\n"


def test_error_leaves_the_conversation_unchanged() -> None:
    output = io.StringIO()
    conversation = Conversation(Script(ChatError("The queue is full.")), output)
    conversation.take("hi")
    assert conversation.messages == [] and output.getvalue() == "error: The queue is full.\n"


def test_stream_bytes_are_parsed() -> None:
    lines = [b": keep-alive\n", b'data: {"choices":[{"delta":{"content":"a"}}]}\n', b'data: {"choices":[]}\n',
             b'data: {"error":{"message":"it broke"}}\n']  # fmt: skip
    pieces = _pieces(lines)
    assert next(pieces) == "a"
    with pytest.raises(ChatError, match="it broke"):
        next(pieces)
