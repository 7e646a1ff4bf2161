"""API keys, stored as SHA-256 digests, with their limits. Pure.

    [[keys]]                      # the file of --api-keys-file
    name = "team-a"               # in logs; also the tenant within which prompts share cached KV
    sha256 = "<64 hex digits>"    # of the key, which is stored nowhere
    requests_per_minute = 600     # this and the following fields are optional
    tokens_per_minute = 200000
    max_concurrent = 32           # sequences that run at the same time on a worker; more wait
    weight = 2.0                  # share relative to other keys, 0.01 to 100; default: 1
    store_ratio = 0.5             # part of the store's memory for its requests; default: 1/3, or 1 for a single key
    models = ["qwen"]             # models that it may use, by any of their names; default: all
    highest_priority_class = "batch"  # its requests run in this class or a lower one

`pagestream new-key NAME` creates a key and its entry.
"""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

MAX_KEY_BYTES = 256
MIN_KEY_BYTES = 16  # shorter keys can be guessed; `openssl rand -hex 16` prints 32 bytes
SAMPLE_KEYS = frozenset((b"default", b"changeme", b"your-api-key-here", b"sk-no-key-required", b"token-abc123"))
# Admission stops when the store is 3/4 full. Two keys that use their whole share leave it open.
DEFAULT_STORE_RATIO = 1 / 3
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class ApiKeysError(ValueError):
    """Keys cannot be used. The message names the entry, never a key."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    sha256: str
    requests_per_minute: _Positive | None = None
    tokens_per_minute: _Positive | None = None
    max_concurrent: _Positive | None = None
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=100.0)] = 1.0
    store_ratio: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    models: tuple[str, ...] | None = None
    highest_priority_class: Literal["interactive", "batch"] = "interactive"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name[:80]!r}: expected 1 to 64 letters, digits, '.', '_', and '-'")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(f"sha256 of {self.name!r}: expected 64 lowercase hexadecimal digits")


class _KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[ApiKey]


class KeyRing:
    """The keys that are valid now."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self.keys = tuple(keys)
        for what, values in (("name", [key.name for key in self.keys]), ("sha256", [key.sha256 for key in self.keys])):
            if len(set(values)) != len(values):
                raise ApiKeysError(f"two keys have the same {what}")

    def store_ratio(self, key: ApiKey) -> float:
        """Return the part of the store that the key's requests may hold: all of it for a single key."""
        return key.store_ratio or (DEFAULT_STORE_RATIO if len(self.keys) > 1 else 1.0)

    def find(self, presented: bytes) -> ApiKey | None:
        """Return the matching key. Compares with every key, so that the time reveals nothing about a guess."""
        if not presented or len(presented) > MAX_KEY_BYTES:
            return None
        digest = digest_of(presented)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found


def digest_of(key: bytes) -> str:
    """Return the SHA-256 digest of a key, in hexadecimal."""
    return hashlib.sha256(key).hexdigest()


def single_key(key: str) -> ApiKey:
    """Return the key of --api-key, which has no limits. Raises ApiKeysError."""
    encoded = key.encode()
    if encoded in SAMPLE_KEYS or not MIN_KEY_BYTES <= len(encoded) <= MAX_KEY_BYTES:
        raise ApiKeysError(
            f"PAGESTREAM_API_KEY: use {MIN_KEY_BYTES}-{MAX_KEY_BYTES} bytes, not a sample key. "
            "Try: openssl rand -hex 16"
        )
    return ApiKey(name="default", sha256=digest_of(encoded))


def read_keys(path: Path) -> list[ApiKey]:
    """Read the file of --api-keys-file. Raises ApiKeysError."""
    try:
        content = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _KeysFile)
    except OSError as error:
        raise ApiKeysError(f"--api-keys-file: {path}: {error.strerror}") from error
    except (ValueError, msgspec.ValidationError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise ApiKeysError(f"--api-keys-file: {path}: {error}") from error
    if not content.keys:
        raise ApiKeysError(f"--api-keys-file: {path}: expected at least one [[keys]] entry, got none")
    return content.keys
