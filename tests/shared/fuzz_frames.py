"""Fuzz the message decoders: python -m tests.shared.fuzz_frames [--seconds 60 | --inputs N] [--seed N], or make fuzz.

A decoder must return a message or raise FormatError for any bytes, within a second and with little memory. The fuzzer
runs in its own process to limit its memory. A failure prints the bytes in hex; add them to SAVED.
"""

import argparse
import inspect
import random
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack

from shared import messages
from shared.kv_snapshot import KVMove, KVRequest, KVSnapshot
from shared.messages import FormatError, encode

MEMORY_BYTES = 2 * 2**30  # limit of the address space; the modules take 0.3 of it
GROWTH_BYTES = 128 * 2**20
INPUT_SECONDS = 1.0
INPUT_BYTES = 2**20  # a journal of empty frames takes 40 bytes of memory per byte

DECODERS: list[Callable[[bytes], Any]] = [
    function for name, function in inspect.getmembers(messages, inspect.isfunction) if name.startswith("decode_")
] + [lambda data: messages.journal_choices(data, 4)]


def valid_samples() -> list[bytes]:
    usage = messages.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    scored = messages.encoded_logprobs(messages.TokenLogprobs(-0.5, (3, 9), (-0.5, -1.25)))
    tokens = messages.TokenEvent("a" * 32, 7, [1, 300, 70_000], 1, messages.FinishReason.STOP, [scored] * 3)
    end = messages.FinishEvent("a", messages.FinishReason.LENGTH, usage)
    error = messages.ErrorEvent("a", messages.ErrorCode.REQUEST_FAILED, "it broke \u00e9")
    sampling = messages.SamplingParams(
        max_tokens=5, seed=2**63 - 1, n=2, temperature=0.5, logit_bias={7: -1.5}, stop_token_ids=(2, 3), logprobs=2
    )
    request = messages.GenerationRequest(
        request_id="a" * 32, prompt_token_ids=list(range(40)), sampling=sampling, tenant="t", cache_salt="s"
    )
    frames = [
        messages.JournalFrame(0, [1, 2], messages.JournalExtras([scored] * 2)),
        messages.JournalFrame(0, [5], None, 1, messages.FinishReason.STOP),
        messages.JournalFrame(2, [300_000]),
    ]
    beat = messages.WorkerHeartbeat(worker_id="w0.1", phase=messages.WorkerPhase.LOAD, progress=0.5, step=3)
    sequence = KVRequest(id="a#0", state="running", num_tokens=5, num_computed_tokens=4, blocks=[1, 2], host_blocks=[3])
    move = KVMove(number=1, kind="allocate", request_id="a", reason="", num_blocks=1, num_bytes=4, num_tokens=5)
    snapshot = KVSnapshot(worker="w", block_size=16, states="ffa", requests=[sequence], events=[move])
    batch = messages.EventBatch(messages.PROTOCOL_VERSION, "w0.1", 7, [tokens, end, error])
    return [*map(encode, (request, batch, beat, snapshot, end, error)), b"".join(map(encode, frames))]


# Headers that announce large sizes, and values at the limits of their types.
PROMISES = [bytes([kind]) + b"\xff" * 4 for kind in (0xDD, 0xDF, 0xDB, 0xC6, 0xC9)]
PROMISES += [b"\xdd\x00\x10\x00\x00", b"\xdc\xff\xff", b"\x91" * 600, b"\x81\xa1a" * 600, b"\xc1"]
EDGES: list[Any] = [-1, 0, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**64 - 1, -(2**63), True, False, None, float("nan"),
         1.5, "", "x" * 300, b"", b"\xff" * 300, [], {}, [[]], {"": 0}, {1: 1},
         "\x00", "stop", "t", "f", "e"]  # fmt: skip
EDGE_BYTES = [msgpack.packb(edge) for edge in EDGES]

# Inputs that once crashed a decoder or nearly did. They are tried first in every run.
SAVED = [
    bytes.fromhex(text)
    for text in (
        "", "c1", "ddffffffff", "dfffffffff", "81910102", "9401a1ff0190", "c7050161616161", "80049551c000",
        "dd000fffff",
        "95" * 40, "de0001c0c0", "d9ff", "cf" + "ff" * 8, "cb7ff8000000000000", "9400a0009193a17401", "91" * 1024,
    )
]  # fmt: skip


@dataclass
class Fuzzer:
    rng: random.Random
    samples: list[bytes]

    def inputs(self) -> Iterator[bytes]:
        yield from SAVED
        yield from self.samples
        while True:
            data = self.rng.choice(self.samples)
            for _ in range(self.rng.choice((1, 1, 1, 2, 4, 16))):
                data = self.rng.choice(MUTATIONS)(self, data)[:INPUT_BYTES]
            yield data

    def place(self, data: bytes) -> int:
        return self.rng.randrange(len(data) + 1)

    def flip(self, data: bytes) -> bytes:
        if not data:
            return b"\x00"
        position = self.rng.randrange(len(data))
        return data[:position] + bytes([data[position] ^ 1 << self.rng.randrange(8)]) + data[position + 1 :]

    def replace_byte(self, data: bytes) -> bytes:
        position = self.place(data)
        return data[:position] + bytes([self.rng.randrange(256)]) + data[position + 1 :]

    def cut(self, data: bytes) -> bytes:
        return data[: self.place(data)]

    def remove(self, data: bytes) -> bytes:
        start = self.place(data)
        return data[:start] + data[start + self.rng.randrange(1, 9) :]

    def repeat(self, data: bytes) -> bytes:
        start, end = sorted((self.place(data), self.place(data)))
        # Repetitions beyond INPUT_BYTES would be cut: 50 MiB would count as this program's memory, not a decoder's.
        max_repeats = 1 + INPUT_BYTES // max(1, end - start)
        return data[:end] + data[start:end] * min(max_repeats, self.rng.choice((1, 1, 2, 50))) + data[end:]

    def splice(self, data: bytes) -> bytes:
        other = self.rng.choice(self.samples)
        return data[: self.place(data)] + other[self.place(other) :]

    def insert_promise(self, data: bytes) -> bytes:
        position = self.place(data)
        return data[:position] + self.rng.choice(PROMISES) + data[position:]

    def insert_edge(self, data: bytes) -> bytes:
        position = self.place(data)
        return data[:position] + self.rng.choice(EDGE_BYTES) + data[position + self.rng.choice((0, 1)) :]

    def replace_number(self, data: bytes) -> bytes:
        position = self.place(data)
        return data[:position] + b"\xcf" + struct.pack(">Q", self.rng.getrandbits(64)) + data[position + 1 :]

    def replace_item(self, data: bytes) -> bytes:
        """Exchange one value of valid MessagePack, to get past the parser to the types."""
        try:
            item = msgpack.unpackb(data, strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException):
            return data
        return _packed(self._exchanged(item, 0), data)

    def _exchanged(self, item: Any, depth: int) -> Any:
        if depth > 8 or not isinstance(item, list | dict) or not item or self.rng.random() < 0.2:
            return self.rng.choice(EDGES)
        keys = list(item) if isinstance(item, dict) else list(range(len(item)))
        key = self.rng.choice(keys)
        item[key] = self._exchanged(item[key], depth + 1)
        return item


MUTATIONS = [
    Fuzzer.flip, Fuzzer.replace_byte, Fuzzer.cut, Fuzzer.remove, Fuzzer.repeat, Fuzzer.splice, Fuzzer.insert_promise,
    Fuzzer.insert_edge, Fuzzer.replace_number, Fuzzer.replace_item, Fuzzer.replace_item,
]  # fmt: skip


def _packed(item: Any, otherwise: bytes) -> bytes:
    try:
        return bytes(msgpack.packb(item))
    except (ValueError, TypeError, OverflowError):
        return otherwise


def up_to(num_inputs: int) -> Callable[[int], bool]:
    return lambda num_tried: num_tried >= num_inputs


def until(deadline: float) -> Callable[[int], bool]:
    """Return whether the monotonic clock has passed `deadline`, for any number of inputs."""
    return lambda num_tried: time.monotonic() > deadline


def fuzz(is_enough: Callable[[int], bool], seed: int) -> tuple[int, int]:
    """Try inputs until `is_enough(number)` and return (inputs tried, inputs decoded).

    Raises:
        AssertionError: If an input takes too long.
        BaseException: What a decoder raises, except FormatError.
    """
    fuzzer = Fuzzer(random.Random(seed), valid_samples())
    num_decoded = 0
    for num_tried, data in enumerate(fuzzer.inputs(), 1):
        started = time.process_time()
        for decode in DECODERS:
            try:
                decode(data)
                num_decoded += 1
            except FormatError:
                pass
            except BaseException:
                print(f"input: {data.hex()}", file=sys.stderr)
                raise
        if time.process_time() - started > INPUT_SECONDS * len(DECODERS):
            raise AssertionError(f"slow input: {data.hex()}")
        if is_enough(num_tried):
            return num_tried, num_decoded
    raise AssertionError("the inputs have no end")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--inputs", type=int, help="number of inputs instead of a duration; equal on every machine")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print(f"seed {options.seed}", flush=True)
    fuzz(up_to(1_000), options.seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    is_enough = up_to(options.inputs) if options.inputs else until(time.monotonic() + options.seconds)
    num_tried, num_decoded = fuzz(is_enough, options.seed)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(f"{num_tried} inputs, each to {len(DECODERS)} decoders, {num_decoded} decoded; {grown >> 20} MB more memory")
    return 0 if grown < GROWTH_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
