"""Message encoding: messages round-trip, and hostile bytes raise only FormatError, fast and with little memory."""

import gc
import tracemalloc
from contextlib import suppress

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    ErrorCode,
    ErrorEvent,
    EventBatch,
    FinishEvent,
    FinishReason,
    FormatError,
    GenerationRequest,
    JournalExtras,
    JournalFrame,
    PromptLogprobs,
    SamplingParams,
    StoredChoice,
    TokenEvent,
    TokenLogprobs,
    Usage,
    WorkerHeartbeat,
    WorkerPhase,
    decode_event_batch,
    decode_heartbeat,
    decode_journal,
    decode_request,
    decode_terminal_event,
    decoded_logprobs,
    encode,
    encoded_logprobs,
    journal_choices,
)
from tests.idle_seconds import idle_seconds


def journal_token_ids(data: bytes) -> list[int]:
    """Return the token ids of a journal with one sequence."""
    return journal_choices(data, 1)[0].token_ids


FINISH = FinishEvent("a", FinishReason.STOP, Usage(prompt_tokens=3, completion_tokens=2))
ERROR = ErrorEvent("a", ErrorCode.REQUEST_FAILED, "it broke")
BATCH = EventBatch(PROTOCOL_VERSION, "w0.1", 7, [TokenEvent("a", 0, [1, 2]), FINISH, ERROR])
REQUEST = GenerationRequest(
    request_id="a",
    prompt_token_ids=[1, 2, 3],
    sampling=SamplingParams(max_tokens=5, seed=2**63 - 1, logit_bias={7: -1.5}, stop_token_ids=(2,)),
)

HEARTBEAT = WorkerHeartbeat(worker_id="w0.1", phase=WorkerPhase.LOAD, progress=0.5, step=3)
JOURNAL = (
    encode(JournalFrame(0, [1, 2])) + encode(JournalFrame(2, [300_000])) + msgpack.packb([3, [4], {"x": 1}, 0, None])
)

DECODERS = [
    decode_request,
    decode_event_batch,
    decode_heartbeat,
    decode_terminal_event,
    decode_journal,
    journal_token_ids,
]
SAMPLES = [encode(message) for message in (REQUEST, BATCH, HEARTBEAT, FINISH, ERROR)] + [JOURNAL]


def test_messages_round_trip():
    assert decode_request(encode(REQUEST)) == REQUEST
    assert decode_event_batch(encode(BATCH)) == BATCH
    assert decode_heartbeat(encode(HEARTBEAT)) == HEARTBEAT
    assert [decode_terminal_event(encode(event)) for event in (FINISH, ERROR)] == [FINISH, ERROR]
    assert journal_token_ids(JOURNAL) == [1, 2, 300_000, 4]
    assert journal_token_ids(b"") == []


def test_journal_cut_anywhere_gives_its_whole_frames():
    lengths = {len(journal_token_ids(JOURNAL[:end])) for end in range(len(JOURNAL) + 1)}
    assert lengths == {0, 2, 3, 4}
    assert journal_token_ids(JOURNAL[:-1]) == [1, 2, 300_000]


@pytest.mark.parametrize("index", [0, 1, 3, 2**31 - 1])
def test_journal_with_gap_or_overlap_is_refused(index):
    with pytest.raises(FormatError, match="index 2"):
        journal_token_ids(encode(JournalFrame(0, [1, 2])) + encode(JournalFrame(index, [3])))


def test_journal_of_several_sequences_is_separated():
    frames = [
        JournalFrame(0, [1], None, 1),
        JournalFrame(0, [2]),
        JournalFrame(1, [3, 4], None, 1, FinishReason.STOP),
        JournalFrame(1, []),  # reports only that the search continues
    ]
    data = b"".join(map(encode, frames))
    assert journal_choices(data, 3) == [
        StoredChoice([2]),
        StoredChoice([1, 3, 4], FinishReason.STOP),
        StoredChoice(),
    ]
    with pytest.raises(FormatError, match="below 1, got a frame of 1"):
        journal_choices(data, 1)
    with pytest.raises(FormatError, match="index 3"):
        journal_choices(data + encode(JournalFrame(3, [5], None, 1)), 3)


LOGPROBS = [TokenLogprobs(-0.5, (3, 9), (-0.5, -1.25)), TokenLogprobs(float("-inf"), (), ())]
ENCODED_LOGPROBS = list(map(encoded_logprobs, LOGPROBS))


def test_logprobs_round_trip_with_their_index():
    event = TokenEvent("a", 4, [3, 5], logprobs=ENCODED_LOGPROBS)
    batch = EventBatch(PROTOCOL_VERSION, "w", 1, [event])
    assert decode_event_batch(encode(batch)) == batch
    frames = [JournalFrame(0, [1]), JournalFrame(1, [3, 5], JournalExtras(ENCODED_LOGPROBS)), JournalFrame(3, [6])]
    (choice,) = journal_choices(b"".join(map(encode, frames)), 1)
    assert choice == StoredChoice([1, 3, 5, 6], logprobs={1: ENCODED_LOGPROBS[0], 2: ENCODED_LOGPROBS[1]})


def test_journal_logprobs_of_known_tokens_are_skipped():
    prompt = PromptLogprobs(1, ENCODED_LOGPROBS[:1])
    frames = [
        JournalFrame(0, [], JournalExtras(prompt_logprobs=prompt)),
        JournalFrame(0, [1, 3], JournalExtras(ENCODED_LOGPROBS)),
        JournalFrame(0, [2], JournalExtras(ENCODED_LOGPROBS[:1]), 1),
        JournalFrame(2, [4, 5], JournalExtras(ENCODED_LOGPROBS)),
    ]
    data = b"".join(map(encode, frames))
    first, second = {0: ENCODED_LOGPROBS[0], 1: ENCODED_LOGPROBS[1]}, {2: ENCODED_LOGPROBS[0], 3: ENCODED_LOGPROBS[1]}
    for known, expected in {
        (): (first | second, 1),
        (1,): (first | second, 1),
        (2, 0): (second, 1),
        (3, 1): (second, 0),
    }.items():
        choices = journal_choices(data, 2, known)
        assert [choice.token_ids for choice in choices] == [[1, 3, 4, 5], [2]]
        assert (choices[0].logprobs, len(choices[1].logprobs)) == expected
        assert choices[0].prompt_logprobs == {1: ENCODED_LOGPROBS[0]}
    assert [choice.logprobs for choice in journal_choices(data, 2, (4, 1))] == [{}, {}]


@pytest.mark.parametrize("end", [b"\xdd\xff\xff\xff\xff", b"\x92\x00\xdd\x00\x10\x00\x01\x01", b"\xdf\xff\xff\xff\xff"])
def test_journal_tail_announcing_oversize_is_refused(end):
    with pytest.raises(FormatError, match="exceeds max_"):
        decode_journal(JOURNAL + end)


def test_journal_logprobs_must_match_tokens():
    with pytest.raises(FormatError, match="2 log-probabilities for 1 tokens"):
        journal_choices(encode(JournalFrame(0, [1], JournalExtras(ENCODED_LOGPROBS))), 1)


@pytest.mark.parametrize("logprobs", [-1, 21])
def test_request_logprobs_out_of_range_are_refused(logprobs):
    sampling = SamplingParams(max_tokens=1, seed=0, logprobs=logprobs)
    with pytest.raises(FormatError, match="logprobs"):
        decode_request(encode(GenerationRequest(request_id="a", prompt_token_ids=[1], sampling=sampling)))


def test_finish_event_timestamp_is_optional():
    fields = msgpack.unpackb(encode(FINISH))
    assert decode_terminal_event(msgpack.packb(fields[:-1])) == FINISH
    assert decode_terminal_event(msgpack.packb([*fields, "of a later release"])) == FINISH


def test_old_events_and_frames_without_sequence_are_read():
    old = msgpack.packb([PROTOCOL_VERSION, "w", 1, [["t", "a", 3, [7]]]])
    assert decode_event_batch(old).events == [TokenEvent("a", 3, [7])]
    assert decode_journal(msgpack.packb([0, [7]]) + msgpack.packb([1, [8], None])) == [
        JournalFrame(0, [7]),
        JournalFrame(1, [8]),
    ]


def test_batch_of_previous_protocol_version_is_read():
    """A new gateway reads old workers. Versions older than the previous one are refused."""
    event = ["t", "a", 3, [7]]
    assert decode_event_batch(batch_of(event, version=PROTOCOL_VERSION - 1)).events == [TokenEvent("a", 3, [7])]
    with pytest.raises(FormatError, match="protocol version"):
        decode_event_batch(batch_of(event, version=PROTOCOL_VERSION - 2))


def test_journal_fields_of_newer_version_are_ignored():
    """An old gateway drops batches of new workers by their version, and reads their journals."""
    assert decode_journal(msgpack.packb([0, [7], None, 0, None, "new"])) == [JournalFrame(0, [7])]


def batch_of(*events: object, version: object = PROTOCOL_VERSION, step: object = 1) -> bytes:
    return msgpack.packb([version, "w", step, list(events)])


HOSTILE_BATCHES = {
    "empty": b"",
    "array_of_4_G_items": b"\xdd\xff\xff\xff\xff",
    "map_of_4_G_items": b"\xdf\xff\xff\xff\xff",
    "string_of_4_GB": b"\xdb\xff\xff\xff\xff",
    "binary_of_4_GB": b"\xc6\xff\xff\xff\xff",
    "nested_5000_deep": b"\x91" * 5000 + b"\xc0",
    "nested_500_deep_announcing_large_sizes": b"\xdd\x00\x10\x00\x00" * 500,
    "million_nils": b"\xdd\x00\x0f\x42\x40" + b"\xc0" * 10**6,
    "reserved_byte": b"\xc1",
    "extension": b"\xc7\x05\x01aaaaa",
    "timestamp": b"\xd6\xff\x00\x00\x00\x01",
    "bad_utf8": b"\x94\x01\xa1\xff\x01\x90",
    "map_keyed_by_list": b"\x81\x91\x01\x02",
    "trailing_bytes": encode(BATCH) + b"\xc0",
    "not_an_array": msgpack.packb({"version": 1}),
    "unknown_version": batch_of(version=PROTOCOL_VERSION + 1),
    "version_as_bool": batch_of(version=True),
    "version_as_string": batch_of(version="1"),
    "missing_events": msgpack.packb([1, "w", 1]),
    "unknown_tag": batch_of(["x", "a", 0, [1]]),
    "missing_field": batch_of(["t", "a", 0]),
    "negative_index": batch_of(["t", "a", -1, [1]]),
    "index_of_2_to_63": batch_of(["t", "a", 2**63, [1]]),
    "negative_token": batch_of(["t", "a", 0, [-1]]),
    "token_of_2_to_31": batch_of(["t", "a", 0, [2**31]]),
    "token_as_bool": batch_of(["t", "a", 0, [True]]),
    "token_as_float": batch_of(["t", "a", 0, [1.0]]),
    "token_as_nan": batch_of(["t", "a", 0, [float("nan")]]),
    "id_as_bytes": batch_of(["t", b"a", 0, [1]]),
    "id_as_number": batch_of(["t", 5, 0, [1]]),
    "unknown_reason": batch_of(["f", "a", "bored", {"prompt_tokens": 1, "completion_tokens": 1}]),
    "missing_usage": batch_of(["f", "a", "stop"]),
    "usage_with_integer_keys": batch_of(["f", "a", "stop", {1: 1}]),
    "pickle": b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
    "too_long": encode(EventBatch(PROTOCOL_VERSION, "w" * MAX_FRAME_BYTES, 7, [])),
    # Unknown fields must be dropped: at 64 bytes of memory per input byte they would take a gigabyte.
    "unknown_field_of_16_million_lists": b"\x81\xa1x\xdd\x00\xff\xff\x00" + b"\x90" * 0xFFFF00,
    "events_of_4_million_maps": b"\x94\x02\xa1w\x01\xdd\x00\x3f\xff\x00" + b"\x81\xa1a\xc0" * 0x3FFF00,
}


@pytest.mark.parametrize("name", HOSTILE_BATCHES)
def test_hostile_batch_raises_format_error_at_once(name):
    data = HOSTILE_BATCHES[name]
    tracemalloc.start()

    def decode() -> None:
        with pytest.raises(FormatError):
            decode_event_batch(data)

    seconds, (_, peak_bytes) = idle_seconds(decode), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 1 s and 64 MB: a million nils need 0.05 s and 8 MB, a reader without limits minutes and gigabytes.
    assert seconds < 1.0
    assert peak_bytes < 64 * 2**20


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
@pytest.mark.parametrize("sample", SAMPLES, ids=["request", "batch", "heartbeat", "finish", "error", "journal"])
def test_cut_message_decodes_or_raises_format_error(decode, sample):
    for end in range(len(sample)):
        decodes_or_refuses(decode, sample[:end])
    decodes_or_refuses(decode, sample)


@given(data=st.binary(max_size=200), decode=st.sampled_from(DECODERS))
def test_random_bytes_decode_or_raise_format_error(data, decode):
    decodes_or_refuses(decode, data)


@settings(max_examples=200)
@given(
    sample=st.sampled_from(SAMPLES),
    decode=st.sampled_from(DECODERS),
    position=st.integers(0, 10**6),
    byte=st.integers(0, 255),
)
def test_changed_byte_decodes_or_raises_format_error(sample, decode, position, byte):
    changed = bytearray(sample)
    changed[position % len(changed)] = byte
    decodes_or_refuses(decode, bytes(changed))


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4) | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner),
    max_leaves=12,
)


@settings(max_examples=150)  # `make fuzz` tries about ten thousand per second
@given(value=_VALUES, decode=st.sampled_from(DECODERS))
def test_any_msgpack_value_decodes_or_raises_format_error(value, decode):
    decodes_or_refuses(decode, msgpack.packb(value))


def decodes_or_refuses(decode, data: bytes) -> None:
    with suppress(FormatError):
        decode(data)


def test_decoded_logprobs_are_not_tracked_by_gc() -> None:
    """Lists would be: 65,000 tokens with 20 values each, as a slow reader keeps, took a full collection 50 ms."""
    batch = encode(
        EventBatch(PROTOCOL_VERSION, "w", 1, [TokenEvent("a", 0, [1] * 100, logprobs=ENCODED_LOGPROBS * 50)])
    )
    kept = [decode_event_batch(batch) for _ in range(100)]
    gc.collect()  # a tuple is untracked after the first collection
    events = [event for batch in kept for event in batch.events if isinstance(event, TokenEvent)]
    scores = [token for event in events for token in event.logprobs or ()]
    assert len(scores) == 10_000
    assert not any(map(gc.is_tracked, scores))


@pytest.mark.parametrize("encoded", [b"\x90", b"\x93\xa1x\x90\x90", b"\x93\xcb" + bytes(8) + b"\x91\xff\x90", b"\xc0"])
def test_logprobs_malformed_are_refused_on_decode(encoded: bytes) -> None:
    with pytest.raises(FormatError):
        decoded_logprobs([ENCODED_LOGPROBS[0], msgspec.Raw(encoded)])
    assert decoded_logprobs(ENCODED_LOGPROBS) == LOGPROBS and decoded_logprobs([]) == []
