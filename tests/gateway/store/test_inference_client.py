"""The client on a real server, with a worker that is played by hand: what is lost on the way is found again."""

import asyncio

import msgpack
import pytest

from gateway.store.inference_client import InferenceClient, QueueFull, QueueShareFull, Share, StoreUnavailable
from gateway.store.response_stream import cancelled_event
from shared.messages import (
    PROTOCOL_VERSION,
    ErrorCode,
    EventBatch,
    FinishEvent,
    FinishReason,
    JournalFrame,
    TokenEvent,
    Usage,
    WorkerHeartbeat,
    WorkerPhase,
    encode,
)
from shared.new_requests import RetentionTerms
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
from tests.patience import PATIENCE_SECONDS


def has_turns_of(client: InferenceClient, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.store.listening.TURN_SECONDS", seconds)
    monkeypatch.setattr(client._listening, "_seconds_left", seconds)  # of the turn that it is in


class TestStream:
    async def test_tokens_as_they_come_and_then_the_end(self, client, worker):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5)
        assert await anext(stream) == TokenEvent("a", 0, [5])
        await worker.emit("a", 1, 6, 7)
        end = await worker.finish("a", 3)
        assert await rest(stream) == ([6, 7], end)
        assert client.counts.num_journal_reads == 0

    async def test_others_have_turns_between_messages_that_piled_up(
        self, client, worker, connections, keys, monkeypatch
    ):
        """They are there at one time when a gateway was busy, and are read without waiting for the socket."""
        has_turns_of(client, 0.0, monkeypatch)
        stream = await start(client, worker)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        heard_at: list[int] = []
        stream.on_ready = lambda: heard_at.append(turns)
        counting = asyncio.create_task(count())
        async with connections.commands.pipeline(transaction=False) as pipeline:
            for index in range(20):
                batch = EventBatch(PROTOCOL_VERSION, WORKER, index, [TokenEvent("a", index, [5])])
                pipeline.publish(keys.gateway_channel("g"), encode(batch))
            await pipeline.execute()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(heard_at) < 20:
                await asyncio.sleep(0)
        counting.cancel()
        assert len(set(heard_at)) == 20, "each in a turn of its own"

    @pytest.mark.parametrize(("turn_seconds", "num_turns"), [(0.0, 3), (3600.0, 1)])
    async def test_a_message_of_many_requests_is_heard_in_turns(
        self, client, worker, connections, keys, monkeypatch, turn_seconds, num_turns
    ):
        """A step of 1,000 sequences is one message; nobody waits until all of them are answered."""
        has_turns_of(client, turn_seconds, monkeypatch)
        streams = [await start(client, worker, f"request-{number}") for number in range(3)]
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        heard_at: list[int] = []
        for stream in streams:
            stream.on_ready = lambda: heard_at.append(turns)
        counting = asyncio.create_task(count())
        batch = EventBatch(PROTOCOL_VERSION, WORKER, 1, [TokenEvent(stream.request_id, 0, [5]) for stream in streams])
        await connections.commands.publish(keys.gateway_channel("g"), encode(batch))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(heard_at) < 3:
                await asyncio.sleep(0)
        counting.cancel()
        assert len(set(heard_at)) == num_turns

    async def test_lost_tokens_in_the_middle_come_from_the_journal(self, client, worker):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5)
        await worker.emit("a", 1, 6, heard=False)
        await worker.emit("a", 2, 7)
        assert await rest_until(stream, 3) == [5, 6, 7]

    async def test_lost_tokens_at_the_end_come_after_a_quiet_time(self, client, worker):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, heard=False)
        assert await rest_until(stream, 1) == [5]

    async def test_a_lost_end_is_told_by_the_request_itself(self, client, worker):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, heard=False)
        end = await worker.finish("a", 1, heard=False)
        assert await rest(stream) == ([5], end)

    async def test_an_end_that_overtakes_its_tokens_waits_for_them(self, client, worker):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, 6, heard=False)
        end = await worker.finish("a", 2)
        assert await rest(stream) == ([5, 6], end)

    async def test_a_lost_subscription_is_a_gap(self, worker, connections, keys):
        client = InferenceClient(connections, keys, "g", quiet_seconds=3600)  # nothing but the gap may ask
        await client.start()
        await subscribed(connections, keys)
        stream = await start(client, worker)
        await connections.commands.client_kill_filter(_type="pubsub")
        await worker.emit("a", 0, 5, heard=False)
        end = await worker.finish("a", 1, heard=False)
        assert await rest(stream) == ([5], end)
        await client.close()

    async def test_a_bad_message_is_counted_and_costs_nothing(self, client, worker, connections, keys):
        stream = await start(client, worker)
        for data in (b"\xc1", b"", encode(EventBatch(99, WORKER, 1, []))):
            await connections.commands.publish(keys.gateway_channel("g"), data)
        await worker.emit("a", 0, 5)
        end = await worker.finish("a", 1)
        assert await rest(stream) == ([5], end)
        assert client.counts.num_bad_messages == 3

    async def test_what_its_reader_has_is_not_decoded_again(self, client, worker, connections, keys):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, 6)
        assert await rest_until(stream, 2) == [5, 6]
        unreadable = msgpack.packb([0, [5, 6], {"logprobs": "of tokens that were read"}])
        await connections.commands.set(keys.journal("a"), unreadable)
        await worker.emit("a", 2, 7, heard=False)
        end = await worker.finish("a", 3)
        assert await rest(stream) == ([7], end)
        assert client.counts.num_journal_reads > 0

    @pytest.mark.parametrize("what", ["journal", "journal type", "request type", "end", "end of another"])
    async def test_an_unreadable_answer_ends_alone_with_an_error(self, client, worker, connections, keys, what):
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

    async def test_messages_about_strangers_are_ignored(self, client, worker):
        stream = await start(client, worker)
        await worker.scripts.accept("x", b"", gateway_id="g", priority_class="batch")
        await worker.claim()
        await worker.emit("x", 0, 1)
        end = await worker.finish("a", 0)
        assert await rest(stream) == ([], end)

    async def test_a_taken_over_request_goes_on(self, client, worker, scripts):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5)
        await reap_worker(scripts, WORKER)
        successor = HandPlayedWorker(scripts)
        assert await successor.claim() == ["a"]
        await successor.emit("a", 1, 6)
        end = await successor.finish("a", 2)
        assert await rest(stream) == ([5, 6], end)


class TestSubmit:
    async def test_a_full_queue_is_told(self, client):
        first, *_ = [await client.submission.submit(make_request(request_id)) for request_id in "abc"]
        with pytest.raises(QueueFull):
            await client.submission.submit(make_request("d"))
        await client.submission.submit(make_request("e", priority_class="batch"))
        await client.submission.release(first)
        await client.submission.submit(make_request("f"))

    async def test_key_over_its_share_is_told_its_places(self, client):
        share = Share("k", divides_queue=True)
        for request_id in "ab":
            await client.submission.submit_all([make_request(request_id)], share=share)
        with pytest.raises(QueueShareFull) as refused:
            await client.submission.submit_all([make_request("c")] * 3, share=share)
        assert (refused.value.max_places, refused.value.num_places) == (3, 3)

    async def test_a_lost_reply_is_no_second_request(self, client, flaky, worker, connections, keys):
        flaky.fail("accept", "lose", times=2)
        stream = await start(client, worker)
        assert await connections.commands.xlen(keys.queue("interactive")) == 1
        end = await worker.finish("a", 0)
        assert await rest(stream) == ([], end)

    async def test_when_no_reply_comes_the_request_is_withdrawn(self, client, flaky, connections, keys):
        flaky.fail("accept", "lose", times=3)
        with pytest.raises(StoreUnavailable):
            await client.submission.submit(make_request())
        while await connections.commands.exists(keys.request("a")):
            await asyncio.sleep(0)
        assert await connections.commands.xlen(keys.queue("interactive")) == 0

    async def test_a_client_that_leaves_while_submitting_leaves_nothing(self, client, connections, keys):
        task = asyncio.create_task(client.submission.submit(make_request()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while client._withdrawals or client.streams or await connections.commands.exists(keys.request("a")):
            await asyncio.sleep(0)

    async def test_a_store_that_is_away_is_told(self, keys, tmp_path):
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
    async def test_ends_the_stream_hints_the_worker_and_forgets_the_request(self, client, worker, connections, keys):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5)
        assert await anext(stream) == TokenEvent("a", 0, [5])
        async with connections.subscriber.pubsub() as hints:
            await hints.subscribe(keys.control_channel(WORKER))
            await hints.get_message(timeout=PATIENCE_SECONDS)
            await client.submission.release(stream)
            assert (await hints.get_message(timeout=PATIENCE_SECONDS))["data"] == b"a"
        tokens, end = await rest(stream)
        assert (tokens, end.reason, end.usage.completion_tokens) == ([], FinishReason.CANCELLED, 1)
        assert await worker.emit("a", 1, 6) == ["a"]
        await client.submission.release(stream)

    async def test_is_repeated_until_the_store_takes_it(self, client, flaky, worker, connections, keys):
        stream = await start(client, worker)
        flaky.fail("cancel", "refuse", times=2)
        await client.submission.release(stream)
        while await connections.commands.exists(keys.request("a")):
            await asyncio.sleep(0)

    async def test_closing_the_client_withdraws_what_runs(self, client, worker, connections, keys):
        stream = await start(client, worker)
        await client.close()
        _, end = await rest(stream)
        assert end.reason is FinishReason.CANCELLED
        assert not await connections.commands.exists(keys.request("a"))


class TestRepeatedTokens:
    async def test_they_are_counted_over_all_streams(self, client, worker):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, 6)
        await worker.emit("a", 1, 6, 7)  # as a late message or a journal has them
        assert await rest_until(stream, 3) == [5, 6, 7]
        assert client.streams.num_repeated_tokens == 1
        end = await worker.finish("a", 3)
        assert await rest(stream) == ([], end)
        assert client.streams.num_repeated_tokens == 1


class TestLostTail:
    """The store came back without the end of its file, and a worker made other tokens in place of those sent."""

    async def test_the_stream_goes_on_behind_what_its_reader_has(self, client, worker, connections, keys):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5)
        await worker.emit("a", 1, 6, 7)
        assert await rest_until(stream, 3) == [5, 6, 7]
        await connections.commands.set(keys.journal("a"), encode(JournalFrame(0, [5])))
        await worker.emit("a", 1, 66)
        await worker.emit("a", 2, 77, 88)  # of another text: behind 7 it would be nonsense
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not client.counts.num_torn_streams:
                await asyncio.sleep(0.01)
        assert await worker.emit("a", 4, 99) == ["a"]  # the other text is nobody's any more
        assert "a" in await worker.claim()
        assert worker.journals["a"] == encode(JournalFrame(0, [5, 6, 7]))
        await worker.emit("a", 3, 8)
        end = await worker.finish("a", 4)
        assert await rest(stream) == ([8], end)
        assert client.counts.num_torn_streams == 1

    async def test_the_same_tokens_made_again_are_no_tear(self, client, worker, connections, keys):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, 6, 7)
        assert await rest_until(stream, 3) == [5, 6, 7]
        await connections.commands.set(keys.journal("a"), encode(JournalFrame(0, [5])))
        await worker.emit("a", 1, 6)
        await worker.emit("a", 2, 7, 8)
        end = await worker.finish("a", 4)
        assert await rest(stream) == ([8], end)
        assert (client.counts.num_torn_streams, client.streams.num_repeated_tokens) == (0, 2)

    @pytest.mark.parametrize("terms", [None, RetentionTerms(b"record", "h")], ids=["forgotten", "kept"])
    @pytest.mark.parametrize("others", [[66, 77], []], ids=["other tokens", "an earlier end"])
    async def test_what_ended_otherwise_is_an_error_to_who_has_its_beginning(
        self, client, worker, connections, keys, terms, others
    ):
        stream = await client.submission.submit(make_request(), terms=terms)
        await worker.claim()
        await worker.emit("a", 0, 5, 6)
        assert await rest_until(stream, 2) == [5, 6]
        await connections.commands.set(keys.journal("a"), encode(JournalFrame(0, [5, *others])))
        await worker.finish("a", 1 + len(others))
        tokens, end = await rest(stream)
        assert (tokens, end.code) == ([], ErrorCode.REQUEST_FAILED)
        assert await connections.commands.hget(keys.request("a"), "state") == b"done"  # whoever asks again reads it


class TestCutOff:
    """Its workers took this gateway for dead, and its client waits."""

    async def test_a_kept_request_goes_on_behind_what_its_client_has(self, client, worker, scripts, connections, keys):
        stream = await client.submission.submit(make_request(), terms=RetentionTerms(b"record", "h"))
        await worker.claim()
        await worker.emit("a", 0, 5)
        assert await anext(stream) == TokenEvent("a", 0, [5])
        await worker.emit("a", 1, 6, heard=False)
        await scripts.cancel("a", "interactive", gone_gateway_id="g", event=encode(cancelled_event(stream)))
        await worker.finish("a", 2, heard=False)  # it lets go
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await connections.commands.xlen(keys.queue(RESUMED)):
                await asyncio.sleep(0.01)
        assert await worker.claim() == ["a"]
        await worker.emit("a", 2, 7)
        end = await worker.finish("a", 3)
        assert await rest(stream) == ([6, 7], end)
        assert client.counts.num_restored_requests == 1

    async def test_an_end_that_another_gateway_was_asked_for_is_its_end(self, client, worker, scripts):
        stream = await client.submission.submit(make_request(), terms=RetentionTerms(b"record", "h"))
        event = cancelled_event(stream)
        await scripts.cancel("a", "interactive", gone_gateway_id="g", event=encode(event))
        await scripts.cancel("a", "interactive")
        assert await rest(stream) == ([], event)


class TestQueueTimeout:
    @pytest.mark.parametrize("terms", [None, RetentionTerms(b"record", "h")], ids=["forgotten", "kept"])
    @pytest.mark.parametrize("num_lost", [1, 3])
    async def test_a_cancel_whose_reply_is_lost_ends_it_all_the_same(self, client, flaky, scripts, terms, num_lost):
        """No worker is there: whoever is accepted anew here waits for ever."""
        flaky.fail("cancel", "lose", times=num_lost)
        overdue = make_request(queue_deadline=await client.probe.fleet_seconds())
        stream = await client.submission.submit(overdue, terms=terms)
        tokens, end = await rest(stream)
        assert (tokens, end.code) == ([], ErrorCode.QUEUE_TIMEOUT)
        assert flaky.calls.count("cancel") == num_lost + 1
        assert client.counts.num_restored_requests == 0
        await scripts.register(WORKER)
        assert await num_waiting(scripts) == 0

    async def test_the_same_when_the_store_has_lost_it(self, client, connections):
        stream = await client.submission.submit(make_request(queue_deadline=await client.probe.fleet_seconds() + 0.3))
        await connections.commands.flushall()
        assert (await rest(stream))[1].code is ErrorCode.QUEUE_TIMEOUT

    async def test_what_a_worker_had_and_gave_back_without_a_token_is_timed_out(self, client, worker, scripts):
        stream = await client.submission.submit(make_request(queue_deadline=await client.probe.fleet_seconds() + 0.3))
        await worker.claim()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not stream.has_begun:
                await asyncio.sleep(0.01)
        await reap_worker(scripts, WORKER, ReapMode.DRAIN)
        assert (await rest(stream))[1].code is ErrorCode.QUEUE_TIMEOUT


class TestStoreReset:
    async def test_a_lost_request_is_accepted_anew_behind_the_tokens_already_sent(
        self, client, worker, connections, scripts
    ):
        stream = await start(client, worker)
        await worker.emit("a", 0, 5, 6)
        assert await anext(stream) == TokenEvent("a", 0, [5, 6])
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
    async def test_the_fleet_is_what_the_heartbeats_tell(self, client, connections, keys):
        heartbeat = WorkerHeartbeat(worker_id=WORKER, phase=WorkerPhase.LOAD, progress=0.5)
        for data in (b"\xc1", encode(heartbeat)):
            await connections.commands.publish(keys.heartbeat_channel, data)
        while not client.fleet.snapshot():
            await asyncio.sleep(0)
        (status,) = client.fleet.snapshot()
        assert status.heartbeat == heartbeat
        assert status.seconds_since_seen < 60
        assert client.counts.num_bad_messages == 1

    async def test_queue_stats_before_and_with_workers(self, client, worker):
        assert (await client.probe.queue_stats()).all.unfinished == 0
        await client.submission.submit(make_request("a"))
        await worker.claim()
        await client.submission.submit(make_request("b"))
        await client.submission.submit(make_request("c", priority_class="batch"))
        stats = await client.probe.queue_stats()
        assert (stats.all.unfinished, stats.all.pending, stats.all.waiting) == (3, 1, 2)
        assert (stats.queues["interactive"].waiting, stats.queues["batch"].waiting) == (1, 1)
        assert 0 <= stats.oldest_waiting_seconds < 60
        await worker.claim()
        assert (await client.probe.queue_stats()).oldest_waiting_seconds == 0

    async def test_the_write_probe_writes(self, client, connections, keys):
        assert 0 < await client.probe.write_seconds() < 60
        assert await connections.commands.get(keys.write_probe) == b"1"
