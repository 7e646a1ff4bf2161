"""The nodes of a Redis or Valkey cluster, which report the primary of a slot.

All keys of a model have one hash tag, so they lie in one slot, and a program needs only that slot's primary. A cluster
sends PUBLISH to all its nodes, so subscribers hear it at any of them.
"""

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError, RedisError

from shared.store_address import Host, StoreAddress

NODE_SECONDS = 0.5  # time limit of a node's reply; then the next one is asked


class ClusterNodes:
    """Finds the primary of the slot of a hash tag."""

    def __init__(self, address: StoreAddress, hash_tag: str) -> None:
        self._url = address.url
        self._seeds = address.nodes
        self._slot: int = key_slot(hash_tag.encode())
        self._known: list[Host] = []  # as the last reply named them; the URL's nodes may be gone
        self._clients: dict[Host, Redis] = {}

    async def find_primary(self) -> Host:
        """Return the host and port of the slot's primary, as the first node that sees the cluster working reports it.

        Raises:
            ConnectionError: If no such node answers, or the slot has no primary.
        """
        reasons = []
        for node in dict.fromkeys((*self._known, *self._seeds)):
            try:
                return await self._ask(node)
            except (RedisError, OSError) as error:
                reasons.append(f"{node[0]}:{node[1]}: {error}")
        raise ConnectionError(f"no node of the cluster reports a primary of slot {self._slot}: {'; '.join(reasons)}")

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def _ask(self, node: Host) -> Host:
        client = self._client_of(node)
        info = await client.cluster("INFO")
        if info["cluster_state"] != "ok":  # a node that is cut off would report an old primary
            raise ConnectionError(f"cluster_state is {info['cluster_state']}")
        ranges = await client.cluster("SLOTS")
        self._known = [_host(each, node) for _, _, *nodes in ranges for each in nodes]
        for first, last, primary, *_ in ranges:
            if first <= self._slot <= last:
                return _host(primary, node)
        raise ConnectionError("the slot has no primary")

    def _client_of(self, node: Host) -> Redis:
        if node not in self._clients:
            client = Redis.from_url(
                self._url,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                socket_timeout=NODE_SECONDS,
                socket_connect_timeout=NODE_SECONDS,
            )
            host, port = node
            client.connection_pool.connection_kwargs.update(host=host, port=port)
            self._clients[node] = client
        return self._clients[node]


def _host(entry: Sequence[Any], asked: Host) -> Host:
    """Return the address of a node; without a name it is where it was asked."""
    name, port = entry[0], int(entry[1])
    text = name.decode() if isinstance(name, bytes) else name or ""
    return text if text not in ("", "?") else asked[0], port
