"""A GGUF file, opened, with its metadata by key, and the one error of all readers here. Knows no key's meaning.

It is used once a file, by the readers beside it, before anything is served.
"""

import struct
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, ReaderTensor

_HEADER = struct.Struct("<4sIQQQ")  # magic, version, number of tensors, number of keys; length of the first key
_FIRST_KEY = b"general.architecture"
_STRING = struct.Struct("<IQ")  # its type, its length
_LONGEST_NAME = 64


class ConversionError(ValueError):
    """This GGUF file cannot be converted faithfully; the message says what is in the way."""


def architecture_of(path: Path) -> str | None:
    """The file's name for its family, where that is its first key as llama.cpp and `gguf` write it; else None.

    A vocabulary takes seconds to read: a family that is not read from GGUF is refused before.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            return None
        magic, _version, _num_tensors, _num_keys, length = _HEADER.unpack(head)
        if magic != b"GGUF" or length != len(_FIRST_KEY) or file.read(length) != _FIRST_KEY:
            return None
        kind, length = _STRING.unpack(file.read(_STRING.size).ljust(_STRING.size, b"\0"))
        is_name = kind == GGUFValueType.STRING and length <= _LONGEST_NAME
        return file.read(length).decode("utf-8", "replace") if is_name else None


class GgufFile:
    """`name` stands in errors; `tensors` are by their names in the file."""

    def __init__(self, path: Path) -> None:
        """Raises ConversionError for what is no whole GGUF file, and for one part of several."""
        self.name = path.name
        self._reader = _open(path)
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        if (parts := self.get("split.count", 1)) > 1:
            raise ConversionError(
                f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge`, and give the whole file"
            )

    def get(self, key: str, default: Any = None) -> Any:
        entry = self._reader.get_field(key)
        return default if entry is None else entry.contents()

    def required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConversionError(f"the GGUF file has no {key}")
        return value

    @property
    def architecture(self) -> str:
        """As llama.cpp calls the family, which is the first word of the family's keys."""
        return str(self.required("general.architecture"))

    def of_model(self, key: str, default: Any = None) -> Any:
        """The value of the family's key: `block_count` is `llama.block_count` of a Llama."""
        value = self.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            raise ConversionError(f"{self.architecture}.{key} differs from layer to layer, which is not supported")
        return value

    def of_model_required(self, key: str) -> Any:
        value = self.of_model(key)
        if value is None:
            raise ConversionError(f"the GGUF file has no {self.architecture}.{key}")
        return value


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except FileNotFoundError:
        raise ConversionError(f"{path} does not exist") from None
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        # What gguf raises for a wrong magic or version, and for a file that ends before its metadata or tensors do.
        raise ConversionError(
            f"{path} is not a readable GGUF file, or was cut off at {path.stat().st_size:,} bytes: {error}"
        ) from error
