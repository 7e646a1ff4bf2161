"""JSON of many megabytes, written while its values come and put together in pieces. Pure.

    array = LongArray()
    array.extend(b"[1,2]")                     the elements of an array, as JSON
    form = GrownForm({"content": b"[]"})       an object of such arrays
    body += pieces of json_pieces({"logprobs": array, ...})

One call that encodes or copies 28 MB of log-probabilities keeps the interpreter for 20 ms, in whatever thread it is
made. Here none is longer than PIECE_BYTES and what was added at one time.

A token's way back, where an answer is not streamed. It knows JSON, and not what it says.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

PIECE_BYTES = 65_536
_PLACE = b"\0"  # of an array: JSON has no such byte, as it escapes control characters

_encode = msgspec.json.encode


class LongArray:
    """Elements that are encoded already."""

    def __init__(self) -> None:
        self._pieces = [bytearray()]
        self._before = b"["  # the next element

    def extend(self, array: bytes) -> None:
        """`array`: as JSON, with its brackets."""
        if len(array) == len(b"[]"):
            return
        if len(self._pieces[-1]) >= PIECE_BYTES:
            self._pieces.append(bytearray())
        last = self._pieces[-1]
        last += self._before
        last += memoryview(array)[1:-1]
        self._before = b","

    def pieces(self) -> Iterator[bytes | bytearray]:
        yield from self._pieces
        yield b"[]" if self._before == b"[" else b"]"


class GrownForm:
    """One object of many of the same fields: their arrays are joined, all else is as in the first."""

    def __init__(self, first: Mapping[str, Any]) -> None:
        """`first`: without elements."""
        self.fields = {name: value if value is None else LongArray() for name, value in first.items()}
        self.extend(first)

    def extend(self, form: Mapping[str, Any]) -> None:
        for name, array in self.fields.items():
            if array is not None:
                array.extend(_encode(form[name]))


def json_pieces(value: Any) -> Iterator[bytes | bytearray]:
    """`value` as JSON; LongArrays may stand anywhere in it."""
    arrays: list[LongArray] = []

    def place_of(array: object) -> msgspec.Raw:
        assert isinstance(array, LongArray), f"{type(array)} is no JSON"
        arrays.append(array)
        return msgspec.Raw(_PLACE)

    first, *others = _encode(value, enc_hook=place_of).split(_PLACE)
    yield first
    for array, between in zip(arrays, others, strict=True):
        yield from array.pieces()
        yield between
