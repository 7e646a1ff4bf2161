"""JSON bodies of many megabytes, collected while values arrive and produced in pieces. Pure.

    array = LongArray()
    array.extend(b"[1,2]")                     elements of an array, as JSON
    form = GrownForm({"content": b"[]"})       an object of such arrays
    body += pieces of json_pieces({"logprobs": array, ...})

Encoding or copying 28 MB of log-probabilities in one call holds the interpreter for 20 ms in any thread. Here no call
handles more than PIECE_BYTES or one added value.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

PIECE_BYTES = 65_536
_PLACE = b"\0"  # placeholder of an array; JSON escapes control characters, so it cannot contain this byte

_encode = msgspec.json.encode


class LongArray:
    """An array whose elements are already encoded."""

    def __init__(self) -> None:
        self._pieces = [bytearray()]
        self._before = b"["  # written before the next element

    def extend(self, array: bytes) -> None:
        """Append the elements of `array`, a JSON array with brackets."""
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
    """One object joined from many with the same fields: arrays are concatenated, nulls stay."""

    def __init__(self, first: Mapping[str, Any]) -> None:
        """Create the object from the first one."""
        self.fields = {name: value if value is None else LongArray() for name, value in first.items()}
        self.extend(first)

    def extend(self, form: Mapping[str, Any]) -> None:
        for name, array in self.fields.items():
            if array is not None:
                array.extend(_encode(form[name]))


def json_pieces(value: Any) -> Iterator[bytes | bytearray]:
    """Encode `value`, which may contain LongArrays, in pieces."""
    arrays: list[LongArray] = []

    def place_of(array: object) -> msgspec.Raw:
        assert isinstance(array, LongArray), f"{type(array)} is not a JSON value"
        arrays.append(array)
        return msgspec.Raw(_PLACE)

    first, *others = _encode(value, enc_hook=place_of).split(_PLACE)
    yield first
    for array, between in zip(arrays, others, strict=True):
        yield from array.pieces()
        yield between
