"""Requests that some workers cannot serve: which workers take them and where they wait."""

from typing import Any

import msgspec
import pytest
from msgspec import structs

from shared.capabilities import SUPPORTED, UNREADABLE_MESSAGE, Abilities, Capability, needs_of
from shared.messages import (
    FormatError,
    GenerationRequest,
    Pooling,
    SamplingParams,
    decode_request,
    encode,
    encode_request,
)
from shared.new_requests import NewRequest, RetentionTerms, Share
from shared.reaping import reap_worker
from shared.redis_client import RedisConnections
from shared.redis_keys import INTERACTIVE, NEWER, PRIORITY_CLASSES, RESUMED, RedisKeys
from shared.redis_scripts import ALL_ABILITIES, AttachStatus, Demand, RedisScripts
from tests.builders import make_request

OLD, SHORT = Abilities(capabilities=0), Abilities(max_model_len=512)
NEEDY: dict[Capability, dict[str, Any]] = {
    Capability.ALLOWED_TOKEN_IDS: {"allowed_token_ids": (504, 253)},
    Capability.BAD_WORDS: {"bad_words": ((7,),)},
    Capability.LOGPROB_TOKEN_IDS: {"logprob_token_ids": (7,)},
}


@pytest.fixture
def scripts(connections: RedisConnections, keys: RedisKeys) -> RedisScripts:
    return RedisScripts(connections.commands, keys)


async def lengths(scripts: RedisScripts) -> dict[str, int]:
    names = (RESUMED, NEWER, *PRIORITY_CLASSES)
    found = {name: await scripts.redis.xlen(scripts.keys.queue(name)) for name in names}
    return {name: length for name, length in found.items() if length}


async def accept(scripts: RedisScripts, request_id: str, queue_name: str = "", **fields: Any) -> None:
    new = NewRequest(request_id, b"body", num_prompt_tokens=5, **fields)
    await scripts.accept_all([new], gateway_id="g", priority_class=INTERACTIVE, queue_name=queue_name)


async def take(scripts: RedisScripts, worker_id: str, abilities: Abilities = ALL_ABILITIES) -> list[str]:
    taken = await scripts.take(worker_id, Demand(10), abilities=abilities)
    return [entry.request_id for entry in taken.entries]


class TestNeeds:
    @pytest.mark.parametrize("capability", NEEDY)
    def test_needs_of_each_capability_has_its_bit(self, capability: Capability) -> None:
        assert needs_of(make_request(5, **NEEDY[capability])) == capability
        assert needs_of(make_request(5)) == 0

    def test_pooling_has_its_bit(self) -> None:
        assert needs_of(structs.replace(make_request(5), pooling=Pooling())) == Capability.POOLING
        assert {*NEEDY, Capability.POOLING} == set(Capability)

    def test_supported_has_every_bit(self) -> None:
        assert SUPPORTED == sum(Capability) < 2**31

    def test_body_with_needs_is_unreadable_for_old_workers(self) -> None:
        request = make_request(5, bad_words=((7,),))
        body = encode_request(request, 2)
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(body, type=GenerationRequest)  # as workers of protocol version 2 do
        assert decode_request(body) == decode_request(body, 2) == request
        with pytest.raises(FormatError, match="needs 0x2; supported: 0x1"):
            decode_request(body, 1)

    def test_body_without_needs_is_unchanged(self) -> None:
        request = make_request(5)
        assert encode_request(request, 0) == encode(request)

    def test_every_new_request_field_has_a_capability_bit(self) -> None:
        """A field added since commit 101a539 needs a bit, or a reason here why older workers may ignore it."""
        assert SamplingParams.__struct_fields__[21:] == ("allowed_token_ids", "bad_words", "logprob_token_ids")
        # A worker that ignores these divides slots unevenly between keys, but its outputs are correct.
        shares = ("tenant_weight", "tenant_max_running")
        # `prefix_key` only chooses among workers.
        fields = ("deadline", "queue_deadline", *shares, "pooling", "prefix_key")
        assert GenerationRequest.__struct_fields__[-6:] == fields


class TestTake:
    async def test_take_leaves_unsupported_request_to_other_worker(self, scripts: RedisScripts) -> None:
        for worker_id in ("old.1", "new.1"):
            await scripts.register(worker_id)
        await accept(scripts, "a", needs=2)
        await accept(scripts, "b")
        assert await take(scripts, "old.1", OLD) == ["b"]
        assert await lengths(scripts) == {NEWER: 1, INTERACTIVE: 1}
        assert await take(scripts, "old.1", OLD) == []
        taken = await scripts.take("new.1", Demand(1))
        (entry,) = taken.entries
        assert (entry.request_id, entry.needs, entry.queue) == ("a", 2, scripts.keys.queue(NEWER))
        (claim,) = await scripts.claim("new.1", [entry])
        assert claim is not None

    async def test_take_short_context_worker_gets_what_fits(self, scripts: RedisScripts) -> None:
        for worker_id in ("short.1", "long.1"):
            await scripts.register(worker_id)
        await accept(scripts, "a", context_tokens=513)
        await accept(scripts, "b", context_tokens=512)
        assert await take(scripts, "short.1", SHORT) == ["b"]
        assert await take(scripts, "long.1") == ["a"]

    async def test_take_reads_newer_queue_first_if_supported(self, scripts: RedisScripts) -> None:
        await scripts.register("w.1")
        await accept(scripts, "c")
        for request_id, needs in (("a", 1), ("b", 2)):
            await accept(scripts, request_id, NEWER, needs=needs)
        assert await take(scripts, "w.1", Abilities(capabilities=1)) == ["a", "c"]
        assert await take(scripts, "w.1") == ["b"]

    async def test_take_moved_entry_keeps_its_waiting_time(self, scripts: RedisScripts) -> None:
        for worker_id in ("old.1", "new.1"):
            await scripts.register(worker_id)
        await accept(scripts, "a", needs=1)
        waiting: Any = await scripts.redis.xrange(scripts.keys.queue(INTERACTIVE))
        before = waiting[0][0]
        await take(scripts, "old.1", OLD)
        (entry,) = (await scripts.take("new.1", Demand(1))).entries
        assert entry.queued_ms == int(before.split(b"-")[0])

    async def test_take_moved_entries_leave_no_turns(self, scripts: RedisScripts) -> None:
        await scripts.register("old.1")
        for key, needs in (("k1", 1), ("k2", 1), ("k1", 0)):
            new = NewRequest(f"{key}-{needs}", b"body", num_prompt_tokens=5, needs=needs)
            await scripts.accept_all([new], gateway_id="g", priority_class=INTERACTIVE, share=Share(key))
        assert await take(scripts, "old.1", OLD) == ["k1-0"]
        await take(scripts, "old.1", OLD)
        assert await scripts.redis.zcard(scripts.keys.turns(INTERACTIVE)[0]) == 0


class TestWaitingAgain:
    @pytest.mark.parametrize("needs", [0, 4])
    async def test_reaped_request_waits_where_able_workers_read(self, scripts: RedisScripts, needs: int) -> None:
        await scripts.register("w.1")
        await accept(scripts, "a", NEWER if needs else "", needs=needs, context_tokens=600)
        await take(scripts, "w.1")
        await reap_worker(scripts, "w.1")
        assert await lengths(scripts) == {NEWER if needs else RESUMED: 1}
        await scripts.register("short.1")
        assert await take(scripts, "short.1", SHORT) == []
        await scripts.register("w.2")
        assert await take(scripts, "w.2") == ["a"]

    async def test_unclaimed_request_keeps_its_needs(self, scripts: RedisScripts) -> None:
        await scripts.register("w.1")
        await accept(scripts, "a", NEWER, needs=4)
        entries = (await scripts.take("w.1", Demand(1))).entries
        await scripts.claim("w.1", entries)
        assert await scripts.unclaim("w.1", entries) == 1
        assert (await scripts.take("w.1", Demand(1))).entries[0].needs == 4

    async def test_unclaim_passes_an_entry_on_once(self, scripts: RedisScripts) -> None:
        await scripts.register("short.1")
        await accept(scripts, "a", context_tokens=600)
        entries = (await scripts.take("short.1", Demand(1))).entries
        assert [await scripts.unclaim("short.1", entries, queue_name=NEWER) for _ in range(2)] == [1, 0]
        assert await lengths(scripts) == {NEWER: 1}

    async def test_orphaned_request_keeps_its_needs(self, scripts: RedisScripts) -> None:
        await scripts.register("w.1")
        await accept(scripts, "a", NEWER, needs=4, terms=RetentionTerms(b"record", "h"))
        await scripts.cancel("a", INTERACTIVE, gone_gateway_id="g", event=b"end")
        assert await lengths(scripts) == {}
        assert await scripts.attach("a", "h", "g", again=True) is AttachStatus.QUEUED_AGAIN
        assert await lengths(scripts) == {NEWER: 1}

    async def test_cancel_waiting_request_with_needs_removes_it(self, scripts: RedisScripts) -> None:
        await accept(scripts, "a", NEWER, needs=4)
        assert await scripts.cancel("a", INTERACTIVE)
        assert await lengths(scripts) == {}


def test_unreadable_message_for_gateways_is_pinned() -> None:
    assert UNREADABLE_MESSAGE == "the stored request is unreadable"  # as in commit 101a539
