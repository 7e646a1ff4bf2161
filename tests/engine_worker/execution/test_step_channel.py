"""The ring buffer in a memfd: messages from rank 0 arrive complete and in order, and corruption is detected."""

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from engine_worker.execution.ranks.group_messages import GroupStart, MoveBlocks, RunStep, encode, start_of, work_of
from engine_worker.execution.ranks.step_channel import NUM_SLOTS, ChannelCorrupted, RingReceiver, RingSender
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.execution.step.cuda_graphs import GraphKey
from engine_worker.execution.step.step_description import EMPTY
from engine_worker.kv.transfers import BlockCopy, Moves, Transfers
from tests.idle_seconds import cpu_seconds, least_share

SLOT_BYTES = 1 << 16
SIZE = 3


@pytest.fixture
def sender() -> Iterator[RingSender]:
    sender = RingSender(SIZE)
    sender.make_slots(SLOT_BYTES)
    yield sender
    sender.close()


@pytest.fixture
def receivers(sender: RingSender) -> list[RingReceiver]:
    return [RingReceiver(sender.fds(rank), rank, SIZE) for rank in range(1, SIZE)]


def overwrite(sender: RingSender, slot: int, offset: int, what: bytes) -> None:
    os.pwrite(sender.fds(1).memory, what, SIZE * 4096 + slot * SLOT_BYTES + offset)


def test_channel_every_follower_reads_all_in_order(sender: RingSender, receivers: list[RingReceiver]) -> None:
    messages = [bytes([number % 251]) * (number * 37 % 5000) for number in range(10 * NUM_SLOTS)]
    read: list[list[bytes]] = [[] for _ in receivers]

    def follow(receiver: RingReceiver, into: list[bytes]) -> None:
        for _ in messages:
            into.append(receiver.receive())

    threads = [threading.Thread(target=follow, args=pair) for pair in zip(receivers, read, strict=True)]
    for thread in threads:
        thread.start()
    for message in messages:
        sender.send(message)
    for thread in threads:
        thread.join()
    assert read == [messages, messages]
    assert sender.messages_behind() == [0, 0]


def test_channel_rank_0_waits_for_slowest_follower(sender: RingSender, receivers: list[RingReceiver]) -> None:
    fast, slow = receivers
    for number in range(NUM_SLOTS):
        sender.send(b"%d" % number)
        fast.receive()
    assert sender.messages_behind() == [0, NUM_SLOTS] and sender.wait_seconds == 0.0
    sending = threading.Thread(target=sender.send, args=(b"late",))
    sending.start()
    sending.join(0.05)
    assert sending.is_alive()
    assert slow.receive() == b"0"
    sending.join()
    assert sender.wait_seconds > 0.0
    assert [slow.receive() for _ in range(NUM_SLOTS)] == [b"1", b"2", b"3", b"late"]
    assert fast.receive() == b"late"


@pytest.mark.parametrize(
    ("offset", "what", "error"),
    [
        (0, b"????", r"message 1: its magic is b'\?\?\?\?', not b'PSTP'"),
        (4, b"\x09\x00", "message 1: its version is 9, not 1"),
        (8, b"\x07", "message 1: its number is 7, not 1"),
        (16, b"\xff\xff\xff\xff", "message 1: 4294967295 bytes, a slot holds 65512"),
        (16, b"\x04", "message 1: its CRC32 is"),
        (20, b"\x00", "message 1: its CRC32 is"),
        (30, b"\x00", r"message 1: its CRC32 is \d+, not \d+"),
    ],
)
def test_channel_corrupted_message_names_both_values(
    sender: RingSender, receivers: list[RingReceiver], offset: int, what: bytes, error: str
) -> None:
    sender.send(b"0123456789")
    overwrite(sender, 1, offset, what)
    with pytest.raises(ChannelCorrupted, match=error):
        receivers[0].receive()
    assert sender.messages_behind() == [1, 1]


def test_channel_too_large_message_is_refused_next_arrives(sender: RingSender, receivers: list[RingReceiver]) -> None:
    with pytest.raises(ValueError, match=f"step of {SLOT_BYTES} bytes: a slot of the channel holds {SLOT_BYTES}"):
        sender.send(bytes(SLOT_BYTES))
    sender.send(bytes(SLOT_BYTES - 24))
    assert len(receivers[0].receive()) == SLOT_BYTES - 24


def test_channel_rank_0_sees_phase_and_cause_of_followers(sender: RingSender, receivers: list[RingReceiver]) -> None:
    assert (sender.phase(1), sender.cause(1)) == ("", "")
    receivers[0].enter("allocate_kv")
    receivers[1].enter("load")
    receivers[1].enter("é" * 200)
    receivers[0].tell_cause("x" * 9000)
    assert sender.phase(1) == "allocate_kv" and sender.cause(1) == "x" * len(sender.cause(1))
    assert sender.phase(2).startswith("ééé")


def test_channel_phases_have_times(sender: RingSender, receivers: list[RingReceiver]) -> None:
    before = time.monotonic()
    for phase in ("import", "load", "load", "load", "serve"):
        receivers[0].enter(phase)
    phases = sender.phases(1)
    assert [phase for phase, _ in phases] == ["import", "load", "serve"]
    assert before - 0.001 <= phases[0][1] <= phases[1][1] <= phases[2][1] <= time.monotonic() + 0.001  # stored in ms


def test_channel_partial_phase_is_ignored(sender: RingSender, receivers: list[RingReceiver]) -> None:
    """A rank killed while it writes leaves a partial phase."""
    receivers[0].enter("load")
    receivers[0].enter("x" * 1000)
    assert sender.phase(1) == "load"


def test_channel_slots_can_be_made_after_followers_start() -> None:
    sender = RingSender(2)
    receiver = RingReceiver(sender.fds(1), 1, 2)
    receiver.enter("import")
    receiver.beat()
    assert (sender.phase(1), sender.beats(1)) == ("import", 1)
    sender.make_slots(SLOT_BYTES)
    sender.send(b"whole")
    assert receiver.receive() == b"whole"
    sender.close()


def test_channel_skew_is_that_of_last_follower(sender: RingSender, receivers: list[RingReceiver]) -> None:
    fast, slow = receivers
    assert sender.skew_seconds() == 0.0
    for number in range(2 * NUM_SLOTS):
        sender.send(b"")
        fast.receive()
        assert number == 0 or sender.skew_seconds() > 0.0  # of the message before
        read_by_fast = time.monotonic_ns()
        while time.monotonic_ns() < read_by_fast + 2_000_000:
            pass
        slow.receive()
        assert 0.002 <= sender.skew_seconds() < 10.0


def test_channel_idle_follower_uses_no_cpu(sender: RingSender, receivers: list[RingReceiver]) -> None:
    thread = threading.Thread(target=receivers[0].receive)
    thread.start()
    used = least_share(lambda: cpu_seconds(os.getpid(), thread.native_id), at_most=0.01, window_seconds=0.5)
    assert thread.is_alive()
    sender.send(b"")
    thread.join()
    assert used <= 0.01


def test_channel_memory_is_allocated_on_write(sender: RingSender) -> None:
    large = RingSender(2)
    large.make_slots(1 << 30)
    assert os.fstat(large.fds(1).memory).st_blocks * 512 <= 1 << 16
    large.close()


def test_channel_messages_survive_serialization(tmp_path: os.PathLike[str]) -> None:
    settings = ExecutionSettings(model=tmp_path, tensor_parallel_size=2, max_num_seqs=7)  # type: ignore[arg-type]
    assert start_of(encode(GroupStart(settings))).settings == settings
    moves = Transfers(Moves([BlockCopy(1, 2)], [BlockCopy(3, 4)], [BlockCopy(5, 6)]), batch_number=9)
    assert work_of(encode(MoveBlocks(moves))) == MoveBlocks(moves)
    graph = GraphKey(8, mixed=True)
    step = RunStep(EMPTY.to_bytes(), (graph.size, graph.mixed), [(3, 67), (67, 70)], 2)
    found = work_of(encode(step))
    assert isinstance(found, RunStep) and found.graph is not None and GraphKey(*found.graph) == graph
    assert [tuple(rows) for rows in found.looks] == [(3, 67), (67, 70)] and found.num_samples == 2
    assert np.array_equal(found.step.query_start_loc, EMPTY.query_start_loc)


def test_channel_message_out_of_order_is_refused(tmp_path: os.PathLike[str]) -> None:
    start = encode(GroupStart(ExecutionSettings(model=tmp_path)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only once"):
        work_of(start)
    with pytest.raises(ValueError, match="first message"):
        start_of(encode(MoveBlocks(Transfers())))
