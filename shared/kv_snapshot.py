"""A worker's account of its KV memory while somebody watches: every block, who has it, and what moved it lately.

Published about once a second on channel {m}:kv, only while {m}:kvw exists; read by the gateway's live page. It tells of
all requests whose they are, and a gateway gives each watcher only its own (`of_tenant`).

It stands beside the walk of a block: from a worker to the gateways' live pages. It knows no tokens.
"""

import msgspec
from msgspec import structs

WATCH_SECONDS = 5  # {m}:kvw lives this long; each gateway with watchers renews it
SNAPSHOT_SECONDS = 1.0


class KVRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of the engine."""

    id: str  # of its request, and the number of the choice: unique
    state: str  # running | waiting | swapped
    num_tokens: int
    num_computed_tokens: int
    blocks: list[int]  # its block table on the device
    tenant: str = ""  # whose it is: the name of an API key, or nobody's
    host_blocks: list[int] = []  # and in host memory, while it is swapped out


class KVMove(msgspec.Struct, frozen=True, kw_only=True):
    """Why blocks moved, in the words of the worker's KV events."""

    number: int
    kind: str
    request_id: str
    reason: str
    num_blocks: int
    num_bytes: int
    num_tokens: int
    time_seconds: float = 0.0  # by the worker's clock
    milliseconds: float | None = None
    tenant: str = ""


class KVSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    block_size: int  # tokens
    states: str  # a letter a block: p(adding) f(ree) c(ached) a(ctive) s(hared)
    requests: list[KVRequest]
    events: list[KVMove]  # since the snapshot before
    host_states: str = ""  # the same of the host's pool; empty if there is none
    time_seconds: float = 0.0  # by the worker's clock, as that of the events


def of_tenant(snapshot: KVSnapshot, tenant: str) -> KVSnapshot:
    """The part that a tenant may see: the states of all blocks, and of requests its own alone.

    Ids, lengths and block tables of others would tell how long their prompts and answers are.
    """
    requests = [structs.replace(request, tenant="") for request in snapshot.requests if request.tenant == tenant]
    events = [
        structs.replace(move, tenant="") for move in snapshot.events if not move.request_id or move.tenant == tenant
    ]
    return structs.replace(snapshot, requests=requests, events=events)
