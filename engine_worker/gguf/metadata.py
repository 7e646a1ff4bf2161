"""Open a GGUF file and read its metadata by key."""

import struct
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, ReaderTensor

_HEADER = struct.Struct("<4sIQQQ")  # magic, version, number of tensors, number of keys, length of the first key
_FIRST_KEY = b"general.architecture"
_STRING = struct.Struct("<IQ")  # value type, length
_LONGEST_NAME = 64


class ConversionError(ValueError):
    """This GGUF file cannot be converted faithfully; the message gives the reason."""


def architecture_of(path: Path) -> str | None:
    """Return the family name if it is the file's first key, as llama.cpp and `gguf` write it, else None.

    Reading a vocabulary takes seconds, so unsupported families are refused before that.
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
    """An open GGUF file with its tensors by name."""

    def __init__(self, path: Path) -> None:
        """Open and check the file.

        Raises:
            ConversionError: If it is missing, incomplete, or one part of a split file.
        """
        self.name = path.name
        self._reader = _open(path)
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        if (parts := self.get("split.count", 1)) > 1:
            raise ConversionError(
                f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge` and use the result"
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
        """llama.cpp's name of the family, which is also the prefix of the family's keys."""
        return str(self.required("general.architecture"))

    def of_model(self, key: str, default: Any = None) -> Any:
        """Return the value of a family key, for example `block_count` for `llama.block_count`."""
        value = self.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            raise ConversionError(f"{self.architecture}.{key} differs from layer to layer, which is not supported")
        return value

    def of_layers(self, key: str) -> list[Any]:
        """Return the values of a family key that differs from layer to layer."""
        values = self.required(f"{self.architecture}.{key}")
        if not isinstance(values, list):
            raise ConversionError(f"{self.architecture}.{key} must have a value for each layer")
        return values

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
        # gguf raises these for a wrong magic or version, and for a file that ends inside its metadata or tensors.
        raise ConversionError(
            f"{path} is not a readable GGUF file, or is truncated at {path.stat().st_size:,} bytes: {error}"
        ) from error
