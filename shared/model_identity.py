"""The identity of the model that a queue serves: all workers of one queue compute the same tokens.

The store keeps it in the hash `{m}:q:model`; REGISTER compares it (register.lua). Two fields are digests of files and
cost some 50 ms; the others are the types in which the worker serves. `max_model_len` is no part of it.
"""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from shared.model_files import ModelFilesError
from shared.version import VERSION

CONFIG_FILES = (
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
HEAD_BYTES = 4096  # of each tensor
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
DIGEST_BYTES = 6
RETRY_SECONDS = 0.25
EARLY_SECONDS = 2.5  # a live worker beats each second
_Result = TypeVar("_Result")


class ModelDiffers(Exception):
    """The queue of this model name serves another model. The message names the field and both values."""

    def __init__(
        self, model_name: str, field: str, stored: str, own: str, num_queued: int, live_worker_ids: tuple[str, ...]
    ) -> None:
        """Describe the difference.

        Args:
            model_name: The served model name.
            field: Field of the identity that differs.
            stored: Value of the queue.
            own: Value of this process.
            num_queued: Requests in the queues.
            live_worker_ids: Incarnations that are not known to be dead.
        """
        why = f"{len(live_worker_ids)} of its workers run" if live_worker_ids else f"{num_queued} requests wait for it"
        super().__init__(
            f"the queue of {model_name!r} serves a model with {field} {stored}, and this one has {field} {own}. {why}: "
            + ("stop them, or choose" if live_worker_ids else "run `pagestream queue clear MODEL`, or choose")
            + " another --served-model-name"
        )
        self._live_worker_ids = live_worker_ids

    def is_certain(self, live_worker_ids: Collection[str]) -> bool:
        """Return whether requests, or workers that beat, use the other model; others may be dead."""
        return not self._live_worker_ids or any(id_ in live_worker_ids for id_ in self._live_worker_ids)


def files_identity(
    directory: Path, load_format: str = "auto", config_files: Sequence[str] = CONFIG_FILES
) -> dict[str, str]:
    """Return the fields `config` and `weights` of a model directory, as hexadecimal digests.

    `load_format` "dummy" replaces the weights by random numbers of a fixed seed. Reads headers and HEAD_BYTES of each
    tensor. Raises ModelFilesError or OSError.
    """
    weights = "dummy:0" if load_format == "dummy" else _weights_digest(directory)
    return {"config": _config_digest(directory, config_files), "weights": weights}


def served_identity(files: Mapping[str, str], *, quantization: str, dtype: str, kv_dtype: str) -> dict[str, str]:
    """Return all fields; the arguments are as the worker serves, not as it was started."""
    return {**files, "quantization": quantization, "dtype": dtype, "kv_dtype": kv_dtype}


def system_fingerprint(identity: Mapping[str, str]) -> str:
    """Return the `system_fingerprint` of answers: a digest of the identity and the release."""
    digest = hashlib.sha256(json.dumps([VERSION, sorted(identity.items())]).encode())
    return f"fp_{digest.hexdigest()[:10]}"


async def wait_for_match(
    attempt: Callable[[], Awaitable[_Result]],
    live_worker_ids: Callable[[], Awaitable[Collection[str]]],
    patience_seconds: float,
) -> _Result:
    """Await `attempt` until it succeeds.

    Args:
        attempt: Raises ModelDiffers if the queue serves another model.
        live_worker_ids: Returns the workers that have beaten since its first call.
        patience_seconds: Time in which a conflicting worker may prove to be dead, for example an earlier incarnation
            of the caller that was not reaped yet.

    Raises:
        ModelDiffers: As soon as it is certain, or after `patience_seconds`.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return await attempt()
        except ModelDiffers as difference:
            if difference.is_certain(await live_worker_ids()) or time.monotonic() >= deadline:
                raise
        await asyncio.sleep(RETRY_SECONDS)


async def refuse_other_model(
    compare: Callable[[], Awaitable[None]], live_worker_ids: Callable[[], Awaitable[Collection[str]]]
) -> None:
    """Raise ModelDiffers if it is certain within some beats. For callers that compare again later."""
    try:
        await wait_for_match(compare, live_worker_ids, EARLY_SECONDS)
    except ModelDiffers as difference:
        if difference.is_certain(await live_worker_ids()):
            raise


def _config_digest(directory: Path, names: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in names:
        path = directory / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def _weights_digest(directory: Path) -> str:
    """Return the digest of all tensors by name, independent of their files."""
    heads = sorted(head for path in directory.glob("*.safetensors") for head in _tensor_heads(path))
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, described, head in heads:
        digest.update(repr((name, described)).encode() + head)
    return digest.hexdigest()


def _tensor_heads(path: Path) -> Iterator[tuple[str, tuple[str, str, int], bytes]]:
    """Yield name, (dtype, shape, number of bytes) and a digest of the first bytes of each tensor of a safetensors file.

    Source: https://github.com/huggingface/safetensors#format.
    """
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ModelFilesError(
                f"{path}: expected a safetensors header of at most {MAX_HEADER_BYTES:,} bytes, got {header_bytes:,}"
            )
        try:
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                start, end = tensor["data_offsets"]
                head = os.pread(file.fileno(), min(HEAD_BYTES, end - start), 8 + header_bytes + start)
                described = tensor["dtype"], str(tensor["shape"]), end - start
                yield name, described, hashlib.blake2b(head, digest_size=16).digest()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelFilesError(f"{path} is not a complete safetensors file: {error}") from error
