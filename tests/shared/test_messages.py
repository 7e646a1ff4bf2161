"""Messages survive the wire; hostile bytes raise FormatError and nothing else, quickly and in little memory."""

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
    """Of a journal of one choice."""
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


def test_round_trips():
    assert decode_request(encode(REQUEST)) == REQUEST
    assert decode_event_batch(encode(BATCH)) == BATCH
    assert decode_heartbeat(encode(HEARTBEAT)) == HEARTBEAT
    assert [decode_terminal_event(encode(event)) for event in (FINISH, ERROR)] == [FINISH, ERROR]
    assert journal_token_ids(JOURNAL) == [1, 2, 300_000, 4]
    assert journal_token_ids(b"") == []


def test_a_journal_cut_anywhere_gives_its_whole_frames():
    lengths = {len(journal_token_ids(JOURNAL[:end])) for end in range(len(JOURNAL) + 1)}
    assert lengths == {0, 2, 3, 4}
    assert journal_token_ids(JOURNAL[:-1]) == [1, 2, 300_000]


@pytest.mark.parametrize("index", [0, 1, 3, 2**31 - 1])
def test_a_journal_with_a_hole_or_an_overlap_is_refused(index):
    with pytest.raises(FormatError, match="index 2"):
        journal_token_ids(encode(JournalFrame(0, [1, 2])) + encode(JournalFrame(index, [3])))


def test_a_journal_of_several_choices():
    frames = [
        JournalFrame(0, [1], None, 1),
        JournalFrame(0, [2]),
        JournalFrame(1, [3, 4], None, 1, FinishReason.STOP),
        JournalFrame(1, []),  # says only that the search goes on
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


TOLD = [TokenLogprobs(-0.5, (3, 9), (-0.5, -1.25)), TokenLogprobs(float("-inf"), (), ())]
SCORED = list(map(encoded_logprobs, TOLD))


def test_log_probabilities_survive_the_wire_and_keep_their_index():
    event = TokenEvent("a", 4, [3, 5], logprobs=SCORED)
    batch = EventBatch(PROTOCOL_VERSION, "w", 1, [event])
    assert decode_event_batch(encode(batch)) == batch
    frames = [JournalFrame(0, [1]), JournalFrame(1, [3, 5], JournalExtras(SCORED)), JournalFrame(3, [6])]
    (choice,) = journal_choices(b"".join(map(encode, frames)), 1)
    assert choice == StoredChoice([1, 3, 5, 6], logprobs={1: SCORED[0], 2: SCORED[1]})


def test_log_probabilities_of_known_tokens_are_not_told_again():
    prompt = PromptLogprobs(1, SCORED[:1])
    frames = [
        JournalFrame(0, [], JournalExtras(prompt_logprobs=prompt)),
        JournalFrame(0, [1, 3], JournalExtras(SCORED)),
        JournalFrame(0, [2], JournalExtras(SCORED[:1]), 1),
        JournalFrame(2, [4, 5], JournalExtras(SCORED)),
    ]
    data = b"".join(map(encode, frames))
    first, second = {0: SCORED[0], 1: SCORED[1]}, {2: SCORED[0], 3: SCORED[1]}
    for known, told in {
        (): (first | second, 1),
        (1,): (first | second, 1),
        (2, 0): (second, 1),
        (3, 1): (second, 0),
    }.items():
        choices = journal_choices(data, 2, known)
        assert [choice.token_ids for choice in choices] == [[1, 3, 4, 5], [2]]
        assert (choices[0].logprobs, len(choices[1].logprobs)) == told
        assert choices[0].prompt_logprobs == {1: SCORED[0]}
    assert [choice.logprobs for choice in journal_choices(data, 2, (4, 1))] == [{}, {}]


@pytest.mark.parametrize("end", [b"\xdd\xff\xff\xff\xff", b"\x92\x00\xdd\x00\x10\x00\x01\x01", b"\xdf\xff\xff\xff\xff"])
def test_what_promises_more_than_a_frame_may_have_is_no_cut_frame(end):
    with pytest.raises(FormatError, match="exceeds max_"):
        decode_journal(JOURNAL + end)


def test_log_probabilities_of_other_tokens_are_refused():
    with pytest.raises(FormatError, match="2 log-probabilities for 1 tokens"):
        journal_choices(encode(JournalFrame(0, [1], JournalExtras(SCORED))), 1)


@pytest.mark.parametrize("logprobs", [-1, 21])
def test_a_request_for_more_log_probabilities_than_are_told_is_refused(logprobs):
    sampling = SamplingParams(max_tokens=1, seed=0, logprobs=logprobs)
    with pytest.raises(FormatError, match="logprobs"):
        decode_request(encode(GenerationRequest(request_id="a", prompt_token_ids=[1], sampling=sampling)))


def test_an_end_without_its_time_is_read_and_one_with_it_is_read_by_who_knows_none():
    fields = msgpack.unpackb(encode(FINISH))
    assert decode_terminal_event(msgpack.packb(fields[:-1])) == FINISH
    assert decode_terminal_event(msgpack.packb([*fields, "of a later release"])) == FINISH


def test_events_and_frames_of_before_there_were_choices_are_read():
    old = msgpack.packb([PROTOCOL_VERSION, "w", 1, [["t", "a", 3, [7]]]])
    assert decode_event_batch(old).events == [TokenEvent("a", 3, [7])]
    assert decode_journal(msgpack.packb([0, [7]]) + msgpack.packb([1, [8], None])) == [
        JournalFrame(0, [7]),
        JournalFrame(1, [8]),
    ]


def test_a_rolling_upgrade_reads_the_frames_of_one_version_back():
    """Old workers beside a new gateway. Of the version before that, nothing is read."""
    event = ["t", "a", 3, [7]]
    assert decode_event_batch(batch_of(event, version=PROTOCOL_VERSION - 1)).events == [TokenEvent("a", 3, [7])]
    with pytest.raises(FormatError, match="protocol version"):
        decode_event_batch(batch_of(event, version=PROTOCOL_VERSION - 2))


def test_fields_that_a_newer_version_appends_are_passed_over():
    """New workers beside an old gateway: it drops their batches, which name their version, and reads the journals."""
    assert decode_journal(msgpack.packb([0, [7], None, 0, None, "new"])) == [JournalFrame(0, [7])]


def batch_of(*events: object, version: object = PROTOCOL_VERSION, step: object = 1) -> bytes:
    return msgpack.packb([version, "w", step, list(events)])


HOSTILE_BATCHES = {
    "empty": b"",
    "array of 4 G items": b"\xdd\xff\xff\xff\xff",
    "map of 4 G items": b"\xdf\xff\xff\xff\xff",
    "string of 4 GB": b"\xdb\xff\xff\xff\xff",
    "binary of 4 GB": b"\xc6\xff\xff\xff\xff",
    "5,000 deep": b"\x91" * 5000 + b"\xc0",
    "500 deep, each claiming much": b"\xdd\x00\x10\x00\x00" * 500,
    "10^6 nils": b"\xdd\x00\x0f\x42\x40" + b"\xc0" * 10**6,
    "reserved byte": b"\xc1",
    "extension": b"\xc7\x05\x01aaaaa",
    "timestamp": b"\xd6\xff\x00\x00\x00\x01",
    "bad UTF-8": b"\x94\x01\xa1\xff\x01\x90",
    "map keyed by a list": b"\x81\x91\x01\x02",
    "bytes after it": encode(BATCH) + b"\xc0",
    "not an array": msgpack.packb({"version": 1}),
    "unknown version": batch_of(version=PROTOCOL_VERSION + 1),
    "version as bool": batch_of(version=True),
    "version as string": batch_of(version="1"),
    "missing events": msgpack.packb([1, "w", 1]),
    "unknown tag": batch_of(["x", "a", 0, [1]]),
    "missing field": batch_of(["t", "a", 0]),
    "negative index": batch_of(["t", "a", -1, [1]]),
    "index of 2^63": batch_of(["t", "a", 2**63, [1]]),
    "negative token": batch_of(["t", "a", 0, [-1]]),
    "token of 2^31": batch_of(["t", "a", 0, [2**31]]),
    "token as bool": batch_of(["t", "a", 0, [True]]),
    "token as float": batch_of(["t", "a", 0, [1.0]]),
    "token as NaN": batch_of(["t", "a", 0, [float("nan")]]),
    "id as bytes": batch_of(["t", b"a", 0, [1]]),
    "id as number": batch_of(["t", 5, 0, [1]]),
    "unknown reason": batch_of(["f", "a", "bored", {"prompt_tokens": 1, "completion_tokens": 1}]),
    "usage missing": batch_of(["f", "a", "stop"]),
    "usage with integer keys": batch_of(["f", "a", "stop", {1: 1}]),
    "pickle": b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
    "too long": encode(EventBatch(PROTOCOL_VERSION, "w" * MAX_FRAME_BYTES, 7, [])),
    # of an unknown field nothing is kept: 64 bytes of memory for each of these bytes would be a gigabyte
    "16 million empty lists in an unknown field": b"\x81\xa1x\xdd\x00\xff\xff\x00" + b"\x90" * 0xFFFF00,
    "4 million maps for events": b"\x94\x02\xa1w\x01\xdd\x00\x3f\xff\x00" + b"\x81\xa1a\xc0" * 0x3FFF00,
}


@pytest.mark.parametrize("name", HOSTILE_BATCHES)
def test_a_hostile_batch_is_a_format_error_at_once(name):
    data = HOSTILE_BATCHES[name]
    tracemalloc.start()

    def decode() -> None:
        with pytest.raises(FormatError):
            decode_event_batch(data)

    seconds, (_, peak_bytes) = idle_seconds(decode), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 1 s and 64 MB: the million nils need 0.05 s and 8 MB, a reader without limits minutes and gigabytes.
    assert seconds < 1.0
    assert peak_bytes < 64 * 2**20


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
@pytest.mark.parametrize("sample", SAMPLES, ids=["request", "batch", "heartbeat", "finish", "error", "journal"])
def test_cut_anywhere_and_read_as_anything(decode, sample):
    for end in range(len(sample)):
        decodes_or_refuses(decode, sample[:end])
    decodes_or_refuses(decode, sample)


@given(data=st.binary(max_size=200), decode=st.sampled_from(DECODERS))
def test_random_bytes(data, decode):
    decodes_or_refuses(decode, data)


@settings(max_examples=200)
@given(
    sample=st.sampled_from(SAMPLES),
    decode=st.sampled_from(DECODERS),
    position=st.integers(0, 10**6),
    byte=st.integers(0, 255),
)
def test_one_byte_changed(sample, decode, position, byte):
    changed = bytearray(sample)
    changed[position % len(changed)] = byte
    decodes_or_refuses(decode, bytes(changed))


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4) | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner),
    max_leaves=12,
)


@settings(max_examples=150)  # `make fuzz` reads some ten thousand a second
@given(value=_VALUES, decode=st.sampled_from(DECODERS))
def test_any_value_of_the_format(value, decode):
    decodes_or_refuses(decode, msgpack.packb(value))


def decodes_or_refuses(decode, data: bytes) -> None:
    with suppress(FormatError):
        decode(data)


def test_scores_that_wait_are_no_matter_for_the_search_for_cyclic_garbage() -> None:
    """Lists were: 65,000 tokens with 20 values each took a full search 50 ms, and a reader that lags has as many."""
    batch = encode(EventBatch(PROTOCOL_VERSION, "w", 1, [TokenEvent("a", 0, [1] * 100, logprobs=SCORED * 50)]))
    kept = [decode_event_batch(batch) for _ in range(100)]
    gc.collect()  # a tuple is left out from the first search on
    events = [event for batch in kept for event in batch.events if isinstance(event, TokenEvent)]
    scores = [token for event in events for token in event.logprobs or ()]
    assert len(scores) == 10_000
    assert not any(map(gc.is_tracked, scores))


@pytest.mark.parametrize("encoded", [b"\x90", b"\x93\xa1x\x90\x90", b"\x93\xcb" + bytes(8) + b"\x91\xff\x90", b"\xc0"])
def test_log_probabilities_that_are_none_are_refused_where_they_are_decoded(encoded: bytes) -> None:
    with pytest.raises(FormatError):
        decoded_logprobs([SCORED[0], msgspec.Raw(encoded)])
    assert decoded_logprobs(SCORED) == TOLD and decoded_logprobs([]) == []
