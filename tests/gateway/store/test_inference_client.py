"""The inference client on a real server with a manually driven worker: lost messages are recovered."""

import asyncio
from typing import Any

import msgpack
import pytest

from gateway.store.inbox import Inbox, StreamState, cancelled_event
from gateway.store.inference_client import InferenceClient
from gateway.store.store_calls import QueueFull, QueueShareFull, StoreUnavailable
from shared.messages import (
    PROTOCOL_VERSION,
    ErrorCode,
    EventBatch,
    FinishEvent,
    FinishReason,
    JournalFrame,
    StreamEvent,
    TokenEvent,
    Usage,
    WorkerHeartbeat,
    WorkerPhase,
    encode,
)
from shared.new_requests import RetentionTerms, Share
from shared.reaping import reap_worker
from shared.redis_client import connect
from shared.redis_keys import RESUMED
from shared.redis_scripts import ReapMode
from tests.gateway.store.conftest import (
    WORKER,
    HandPlayedWorker,
    make_request,
    num_waiting,
    rest,
    rest_until,
    start,
    subscribed,
)
from tests.inbox_reader import InboxReader
from tests.patience import PATIENCE_SECONDS


def has_turns_of(client: InferenceClient, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.store.listening.TURN_SECONDS", seconds)
    monkeypatch.setattr(client._listening, "_seconds_left", seconds)  # of the current time slice


class TestStream:
    async def test_tokens_arrive_one_by_one_before_the_end(self, client, worker):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5)
        assert await anext(InboxReader(stream)) == TokenEvent("a", 0, [5])
        await worker.emit("a", 1, 6, 7)
        end = await worker.finish("a", 3)
        assert await rest(stream) == ([6, 7], end)
        assert client.counts.num_journal_reads == 0

    async def test_accumulated_messages_yield_between_them(self, client, worker, connections, keys, monkeypatch):
        """Messages accumulate while a gateway is busy, and are read without waiting for the socket."""
        has_turns_of(client, 0.0, monkeypatch)
        stream = await start(client, worker)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        received_at: list[int] = []
        stream.on_ready = lambda: received_at.append(turns)
        counting = asyncio.create_task(count())
        async with connections.commands.pipeline(transaction=False) as pipeline:
            for index in range(20):
                batch = EventBatch(PROTOCOL_VERSION, WORKER, index, [TokenEvent("a", index, [5])])
                pipeline.publish(keys.gateway_channel("g"), encode(batch))
            await pipeline.execute()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(received_at) < 20:
                await asyncio.sleep(0)
        counting.cancel()
        assert len(set(received_at)) == 20, "each in its own time slice"

    @pytest.mark.parametrize("names", [("a", "b", "c"), ("a", "a", "a")], ids=["requests", "readers of one"])
    @pytest.mark.parametrize(("turn_seconds", "num_turns"), [(0.0, 3), (3600.0, 1)])
    async def test_message_for_many_streams_is_handled_in_time_slices(
        self, client, worker, connections, keys, monkeypatch, turn_seconds, num_turns, names
    ):
        """A step of 1,000 sequences is one message; others must not wait until all of them are handled."""
        has_turns_of(client, turn_seconds, monkeypatch)
        streams = [await start(client, worker, name) for name in sorted(set(names))]
        for name in names[len(streams) :]:
            reader = Inbox(make_request(name))
            reader.accept()
            client.streams.add(reader)
            streams.append(reader)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        received_at: list[int] = []
        for stream in streams:
            stream.on_ready = lambda: received_at.append(turns)
        counting = asyncio.create_task(count())
        events: list[StreamEvent] = [TokenEvent(name, 0, [5]) for name in sorted(set(names))]
        batch = EventBatch(PROTOCOL_VERSION, WORKER, 1, events)
        await connections.commands.publish(keys.gateway_channel("g"), encode(batch))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(received_at) < 3:
                await asyncio.sleep(0)
        counting.cancel()
        assert len(set(received_at)) == num_turns

    async def test_lost_tokens_in_the_middle_come_from_the_journal(self, client, worker):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5)
        await worker.emit("a", 1, 6, is_delivered=False)
        await worker.emit("a", 2, 7)
        assert await rest_until(stream, 3) == [5, 6, 7]

    async def test_lost_tokens_at_the_end_come_after_a_quiet_time(self, client, worker):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, is_delivered=False)
        assert await rest_until(stream, 1) == [5]

    async def test_lost_end_is_read_from_the_request(self, client, worker):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, is_delivered=False)
        end = await worker.finish("a", 1, is_delivered=False)
        assert await rest(stream) == ([5], end)

    async def test_end_before_its_tokens_waits_for_them(self, client, worker):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, 6, is_delivered=False)
        end = await worker.finish("a", 2)
        assert await rest(stream) == ([5, 6], end)

    async def test_lost_subscription_is_a_gap(self, worker, connections, keys):
        client = InferenceClient(connections, keys, "g", quiet_seconds=3600)  # only the gap may cause a read
        await client.start()
        await subscribed(connections, keys)
        stream = await start(client, worker)
        await connections.commands.client_kill_filter(_type="pubsub")
        await worker.emit("a", 0, 5, is_delivered=False)
        end = await worker.finish("a", 1, is_delivered=False)
        assert await rest(stream) == ([5], end)
        await client.close()

    async def test_invalid_message_is_counted_and_harmless(self, client, worker, connections, keys):
        stream = await start(client, worker)
        for data in (b"\xc1", b"", encode(EventBatch(99, WORKER, 1, []))):
            await connections.commands.publish(keys.gateway_channel("g"), data)
        await worker.emit("a", 0, 5)
        end = await worker.finish("a", 1)
        assert await rest(stream) == ([5], end)
        assert client.counts.num_bad_messages == 3

    async def test_delivered_tokens_are_not_decoded_again(self, client, worker, connections, keys):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, 6)
        assert await rest_until(stream, 2) == [5, 6]
        unreadable = msgpack.packb([0, [5, 6], {"logprobs": "of tokens that were read"}])
        await connections.commands.set(keys.journal("a"), unreadable)
        await worker.emit("a", 2, 7, is_delivered=False)
        end = await worker.finish("a", 3)
        assert await rest(stream) == ([7], end)
        assert client.counts.num_journal_reads > 0

    @pytest.mark.parametrize("what", ["journal", "journal type", "request type", "end", "end of another"])
    async def test_unreadable_answer_fails_alone(self, client, worker, connections, keys, what):
        redis = connections.commands
        stream, other = (
            await client.submission.submit(make_request("a")),
            await client.submission.submit(make_request("b")),
        )
        await worker.claim()
        request, journal = keys.request("a"), keys.journal("a")
        if what == "journal":
            await redis.set(journal, encode(JournalFrame(4, [1])))
        elif what == "journal type":
            await redis.lpush(journal, "x")
        elif what == "request type":
            await redis.delete(request)
            await redis.set(request, "x")
        else:
            stolen = FinishEvent("b", FinishReason.STOP, Usage(prompt_tokens=1, completion_tokens=0))
            terminal = b"\xc1" if what == "end" else encode(stolen)
            await redis.hset(request, mapping={"state": "done", "terminal": terminal})
        tokens, end = await rest(stream)
        assert (tokens, end.code) == ([], "request_failed")
        await worker.emit("b", 0, 5)
        end = await worker.finish("b", 1)
        assert await rest(other) == ([5], end)

    async def test_messages_about_unknown_requests_are_ignored(self, client, worker):
        stream = await start(client, worker)
        await worker.scripts.accept("x", b"", gateway_id="g", priority_class="batch")
        await worker.claim()
        await worker.emit("x", 0, 1)
        end = await worker.finish("a", 0)
        assert await rest(stream) == ([], end)

    async def test_taken_over_request_continues(self, client, worker, scripts):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5)
        await reap_worker(scripts, WORKER)
        successor = HandPlayedWorker(scripts)
        assert await successor.claim() == ["a"]
        await successor.emit("a", 1, 6)
        end = await successor.finish("a", 2)
        assert await rest(stream) == ([5, 6], end)


class TestSubmit:
    async def test_full_queue_is_an_error(self, client):
        first, *_ = [await client.submission.submit(make_request(request_id)) for request_id in "abc"]
        with pytest.raises(QueueFull):
            await client.submission.submit(make_request("d"))
        await client.submission.submit(make_request("e", priority_class="batch"))
        await client.submission.release(first)
        await client.submission.submit(make_request("f"))

    async def test_key_over_its_share_gets_an_error_with_its_slots(self, client):
        share = Share("k", divides_queue=True)
        for request_id in "ab":
            await client.submission.submit_all([make_request(request_id)], share=share)
        with pytest.raises(QueueShareFull) as refused:
            await client.submission.submit_all([make_request("c")] * 3, share=share)
        assert (refused.value.max_places, refused.value.num_places) == (3, 3)

    async def test_lost_reply_causes_no_second_request(self, client, flaky, worker, connections, keys):
        flaky.fail("accept", "lose", times=2)
        stream = await start(client, worker)
        assert await connections.commands.xlen(keys.queue("interactive")) == 1
        end = await worker.finish("a", 0)
        assert await rest(stream) == ([], end)

    async def test_submission_without_reply_is_withdrawn(self, client, flaky, connections, keys):
        flaky.fail("accept", "lose", times=3)
        with pytest.raises(StoreUnavailable):
            await client.submission.submit(make_request())
        while await connections.commands.exists(keys.request("a")):
            await asyncio.sleep(0)
        assert await connections.commands.xlen(keys.queue("interactive")) == 0

    async def test_client_that_leaves_while_submitting_leaves_nothing(self, client, connections, keys):
        task = asyncio.create_task(client.submission.submit(make_request()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while client._withdrawals or client.streams or await connections.commands.exists(keys.request("a")):
            await asyncio.sleep(0)

    async def test_unavailable_store_is_an_error(self, keys, tmp_path):
        away = connect(f"unix://{tmp_path}/no-server")
        client = InferenceClient(away, keys, "g")
        await client.start()
        try:
            with pytest.raises(StoreUnavailable):
                await client.submission.submit(make_request())
            with pytest.raises(StoreUnavailable):
                await client.probe.write_seconds()
            with pytest.raises(StoreUnavailable):
                await client.probe.queue_stats()
        finally:
            await client.close()
            await away.aclose()


class TestCancel:
    async def test_release_ends_stream_hints_worker_and_deletes_request(self, client, worker, connections, keys):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5)
        assert await anext(InboxReader(stream)) == TokenEvent("a", 0, [5])
        async with connections.subscriber.pubsub() as hints:
            await hints.subscribe(keys.control_channel(WORKER))
            await hints.get_message(timeout=PATIENCE_SECONDS)
            await client.submission.release(stream)
            assert (await hints.get_message(timeout=PATIENCE_SECONDS))["data"] == b"a"
        tokens, end = await rest(stream)
        assert (tokens, end.reason, end.usage.completion_tokens) == ([], FinishReason.CANCELLED, 1)
        assert await worker.emit("a", 1, 6) == ["a"]
        await client.submission.release(stream)

    async def test_release_is_repeated_until_the_store_accepts(self, client, flaky, worker, connections, keys):
        stream = await start(client, worker)
        flaky.fail("cancel", "refuse", times=2)
        await client.submission.release(stream)
        while await connections.commands.exists(keys.request("a")):
            await asyncio.sleep(0)

    async def test_readers_that_leave_at_once_each_cancel_once(self, client, flaky, worker, connections, keys):
        streams = [await start(client, worker, f"r{number}") for number in range(100)]
        await asyncio.gather(*map(client.submission.release, streams))
        assert flaky.calls.count("cancel") == 100
        assert not await connections.commands.exists(*(keys.request(stream.request_id) for stream in streams))

    async def test_closing_the_client_withdraws_running_requests(self, client, worker, connections, keys):
        stream = await start(client, worker)
        await client.close()
        _, end = await rest(stream)
        assert end.reason is FinishReason.CANCELLED
        assert not await connections.commands.exists(keys.request("a"))


class TestRepeatedTokens:
    async def test_repeated_tokens_are_counted_over_all_streams(self, client, worker):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, 6)
        await worker.emit("a", 1, 6, 7)  # as in a late message or a journal
        assert await rest_until(stream, 3) == [5, 6, 7]
        assert client.streams.num_repeated_tokens == 1
        end = await worker.finish("a", 3)
        assert await rest(stream) == ([], end)
        assert client.streams.num_repeated_tokens == 1


class TestLostTail:
    """The store lost the end of its file on restart, and a worker generated other tokens in place of those sent."""

    async def test_diverged_stream_continues_after_the_sent_tokens(self, client, worker, connections, keys):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5)
        await worker.emit("a", 1, 6, 7)
        assert await rest_until(stream, 3) == [5, 6, 7]
        await connections.commands.set(keys.journal("a"), encode(JournalFrame(0, [5])))
        await worker.emit("a", 1, 66)
        await worker.emit("a", 2, 77, 88)  # of the diverged text: after 7 it would be nonsense
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not client.counts.num_torn_streams:
                await asyncio.sleep(0.01)
        assert await worker.emit("a", 4, 99) == ["a"]  # the request of the diverged text has ended
        assert "a" in await worker.claim()
        assert worker.journals["a"] == encode(JournalFrame(0, [5, 6, 7]))
        await worker.emit("a", 3, 8)
        end = await worker.finish("a", 4)
        assert await rest(stream) == ([8], end)
        assert client.counts.num_torn_streams == 1

    async def test_other_tokens_that_were_not_announced_are_found_later(self, client, worker, connections, keys):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, 6)
        assert await rest_until(stream, 2) == [5, 6]
        await connections.commands.set(keys.journal("a"), encode(JournalFrame(0, [5])))
        decoded, is_read = client.archive.decoded, asyncio.Event()

        async def decode(*arguments: Any) -> Any:
            answer = await decoded(*arguments)
            is_read.set()
            return answer

        client.archive.decoded = decode
        client.streams.need_journals([stream])  # as after each connection
        await is_read.wait()
        await worker.emit("a", 1, 66, is_delivered=False)
        await worker.emit("a", 2, 77)
        await worker.finish("a", 3)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (stream.has_ended or client.counts.num_torn_streams):
                await asyncio.sleep(0.01)
        assert client.counts.num_torn_streams == 1

    async def test_equal_regenerated_tokens_are_no_divergence(self, client, worker, connections, keys):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, 6, 7)
        assert await rest_until(stream, 3) == [5, 6, 7]
        await connections.commands.set(keys.journal("a"), encode(JournalFrame(0, [5])))
        await worker.emit("a", 1, 6)
        await worker.emit("a", 2, 7, 8)
        end = await worker.finish("a", 4)
        assert await rest(stream) == ([8], end)
        assert (client.counts.num_torn_streams, client.streams.num_repeated_tokens) == (0, 2)

    @pytest.mark.parametrize("terms", [None, RetentionTerms(b"record", "h")], ids=["not stored", "stored"])
    @pytest.mark.parametrize("others", [[66, 77], []], ids=["other tokens", "earlier end"])
    async def test_diverged_end_is_an_error_for_the_reader(self, client, worker, connections, keys, terms, others):
        stream = await client.submission.submit(make_request(), terms=terms)
        await worker.claim()
        await worker.emit("a", 0, 5, 6)
        assert await rest_until(stream, 2) == [5, 6]
        await connections.commands.set(keys.journal("a"), encode(JournalFrame(0, [5, *others])))
        await worker.finish("a", 1 + len(others))
        tokens, end = await rest(stream)
        assert (tokens, end.code) == ([], ErrorCode.REQUEST_FAILED)
        assert await connections.commands.hget(keys.request("a"), "state") == b"done"  # a repeated request reads it


async def test_gap_before_acceptance_makes_the_journal_due(client):
    pending, quiet = [client.submission._open(make_request(name), None) for name in ("a", "b")]
    pending.need_journal()
    for stream in (pending, quiet):
        stream.accept()
    assert [client._recovery._is_due(stream) for stream in (pending, quiet)] == [True, False]
    client.streams.discard(pending, quiet)


class TestCutOff:
    """The workers declared this gateway dead while its client still waits."""

    async def test_kept_request_continues_after_the_sent_tokens(self, client, worker, scripts, connections, keys):
        stream = await client.submission.submit(make_request(), terms=RetentionTerms(b"record", "h"))
        await worker.claim()
        await worker.emit("a", 0, 5)
        assert await anext(InboxReader(stream)) == TokenEvent("a", 0, [5])
        await worker.emit("a", 1, 6, is_delivered=False)
        await scripts.cancel("a", "interactive", gone_gateway_id="g", event=encode(cancelled_event(stream)))
        await worker.finish("a", 2, is_delivered=False)  # the worker releases the request
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await connections.commands.xlen(keys.queue(RESUMED)):
                await asyncio.sleep(0.01)
        assert await worker.claim() == ["a"]
        await worker.emit("a", 2, 7)
        end = await worker.finish("a", 3)
        assert await rest(stream) == ([6, 7], end)
        assert client.counts.num_restored_requests == 1

    async def test_request_that_is_ended_again_at_once_continues(self, client, worker, scripts, flaky):
        """The gateway's commands arrive again before its channel has a listener."""
        stream = await client.submission.submit(make_request(), terms=RetentionTerms(b"record", "h"))
        await worker.claim()
        await worker.emit("a", 0, 5)
        attached, event = flaky.hold("attach"), encode(cancelled_event(stream))
        await scripts.cancel("a", "interactive", gone_gateway_id="g", event=event)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await attached.is_applied.wait()
            assert await scripts.cancel("a", "interactive", gone_gateway_id="g", event=event)
            attached.goes_on.set()
            while await worker.claim() != ["a"]:
                await asyncio.sleep(0.01)
        await worker.emit("a", 1, 6)
        end = await worker.finish("a", 2)
        assert await rest(stream) == ([5, 6], end)

    async def test_cancel_by_another_gateway_ends_the_request(self, client, worker, scripts):
        stream = await client.submission.submit(make_request(), terms=RetentionTerms(b"record", "h"))
        event = cancelled_event(stream)
        await scripts.cancel("a", "interactive", gone_gateway_id="g", event=encode(event))
        await scripts.cancel("a", "interactive")
        assert await rest(stream) == ([], event)


class TestQueueTimeout:
    @pytest.mark.parametrize("terms", [None, RetentionTerms(b"record", "h")], ids=["not stored", "stored"])
    @pytest.mark.parametrize("num_lost", [1, 3])
    async def test_cancel_with_lost_reply_ends_the_request(self, client, flaky, scripts, terms, num_lost):
        """There is no worker, so a request that was accepted again here would wait forever."""
        flaky.fail("cancel", "lose", times=num_lost)
        overdue = make_request(queue_deadline=await client.probe.fleet_seconds())
        stream = await client.submission.submit(overdue, terms=terms)
        tokens, end = await rest(stream)
        assert (tokens, end.code) == ([], ErrorCode.QUEUE_TIMEOUT)
        assert flaky.calls.count("cancel") == num_lost + 1
        assert client.counts.num_restored_requests == 0
        await scripts.register(WORKER)
        assert await num_waiting(scripts) == 0

    async def test_queue_timeout_ends_a_request_lost_by_the_store(self, client, connections):
        stream = await client.submission.submit(make_request(queue_deadline=await client.probe.fleet_seconds() + 0.3))
        await connections.commands.flushall()
        assert (await rest(stream))[1].code is ErrorCode.QUEUE_TIMEOUT

    async def test_requeued_request_without_a_token_times_out(self, client, worker, scripts):
        stream = await client.submission.submit(make_request(queue_deadline=await client.probe.fleet_seconds() + 0.3))
        await worker.claim()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while stream.state is StreamState.QUEUED:
                await asyncio.sleep(0.01)
        await reap_worker(scripts, WORKER, ReapMode.DRAIN)
        assert (await rest(stream))[1].code is ErrorCode.QUEUE_TIMEOUT


class TestStoreReset:
    async def test_lost_request_resumes_after_the_sent_tokens(self, client, worker, connections, scripts):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, 6)
        assert await anext(InboxReader(stream)) == TokenEvent("a", 0, [5, 6])
        await connections.commands.flushall()
        successor = HandPlayedWorker(scripts)
        while not await successor.claim():
            await asyncio.sleep(0.01)
        assert successor.journals["a"] == encode(JournalFrame(0, [5, 6]))
        await successor.emit("a", 2, 7)
        end = await successor.finish("a", 3)
        assert await rest(stream) == ([7], end)
        assert client.counts.num_restored_requests == 1


class TestViews:
    async def test_fleet_reflects_the_heartbeats(self, client, connections, keys):
        heartbeat = WorkerHeartbeat(worker_id=WORKER, phase=WorkerPhase.LOAD, progress=0.5)
        for data in (b"\xc1", encode(heartbeat)):
            await connections.commands.publish(keys.heartbeat_channel, data)
        while not client.fleet.snapshot():
            await asyncio.sleep(0)
        (status,) = client.fleet.snapshot()
        assert status.heartbeat == heartbeat
        assert status.seconds_since_seen < 60
        assert client.counts.num_bad_messages == 1

    async def test_queue_stats_before_and_with_workers_are_exact(self, client, worker):
        assert (await client.probe.queue_stats()).all.unfinished == 0
        await client.submission.submit(make_request("a"))
        await worker.claim()
        await client.submission.submit(make_request("b"))
        await client.submission.submit(make_request("c", priority_class="batch"))
        stats = await client.probe.queue_stats()
        assert (stats.all.unfinished, stats.all.pending, stats.all.waiting) == (3, 1, 2)
        assert (stats.queues["interactive"].waiting, stats.queues["batch"].waiting) == (1, 1)
        assert 0 <= stats.all.oldest_seconds < 60
        await worker.claim()
        assert (await client.probe.queue_stats()).all.oldest_seconds == 0

    async def test_write_probe_writes(self, client, connections, keys):
        assert 0 < await client.probe.write_seconds() < 60
        assert await connections.commands.get(keys.write_probe) == b"1"
