"""Snapshots of a worker's KV memory for live pages: every block, its requests, and recent moves.

A worker publishes them about once a second on channel {m}:kv, only while the key {m}:kvw exists. A snapshot covers all
tenants; a gateway shows each viewer only its own requests (of_tenant).
"""

import msgspec
from msgspec import structs

WATCH_SECONDS = 5  # time to live of {m}:kvw, which each gateway with viewers renews
SNAPSHOT_SECONDS = 1.0


class KVTable(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of one sequence in one group of layers."""

    num_released_blocks: int = 0  # leading blocks that its window has passed; the lists below start after them
    blocks: list[int]  # on the device
    host_blocks: list[int] = []  # in host memory, while it is swapped out


class KVRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of the engine."""

    id: str  # id of the request and index of the sequence; unique
    state: str  # running | waiting | swapped
    num_tokens: int
    num_computed_tokens: int
    blocks: list[int]  # its blocks on the device, of all groups of layers
    tenant: str = ""  # name of the API key; empty without one
    host_blocks: list[int] = []  # blocks in host memory, while it is swapped out
    tables: list[KVTable] = []  # one per group; empty from a worker of an earlier version


class KVMove(msgspec.Struct, frozen=True, kw_only=True):
    """A move of blocks and its reason; `kind` and `reason` are those of the worker's KV events."""

    number: int
    kind: str
    request_id: str
    reason: str
    num_blocks: int
    num_bytes: int
    num_tokens: int
    time_seconds: float = 0.0  # of the worker's clock
    milliseconds: float | None = None
    tenant: str = ""


class KVSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    block_size: int  # tokens
    states: str  # one letter per block: p(adding) f(ree) c(ached) a(ctive) s(hared)
    requests: list[KVRequest]
    events: list[KVMove]  # since the previous snapshot
    host_states: str = ""  # the same for the host pool; empty without one
    time_seconds: float = 0.0  # of the worker's clock


def of_tenant(snapshot: KVSnapshot, tenant: str) -> KVSnapshot:
    """Return the part that a tenant may see: the states of all blocks, and its own requests and moves.

    Ids, lengths, and block tables of other tenants would reveal the lengths of their prompts and answers.
    """
    requests = [structs.replace(request, tenant="") for request in snapshot.requests if request.tenant == tenant]
    events = [
        structs.replace(move, tenant="") for move in snapshot.events if not move.request_id or move.tenant == tenant
    ]
    return structs.replace(snapshot, requests=requests, events=events)
