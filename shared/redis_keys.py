"""Every stream, group, channel and key name in Redis.

All names of one served model share the hash tag `{model name}`, so that a script touching several of them stays legal
in a cluster. Nothing else builds a name, but for the Lua scripts, which append an id to a prefix. Every walk that
crosses the store uses it, from ACCEPT of a chat to REAP of a takeover (redis_scripts.py). It knows no connection, and
not what the keys hold; docs/architecture.md has that as a table.
"""

from dataclasses import dataclass

GROUP = "engine"

# Requests of a dead worker wait here, before every other class: their clients already hold half an answer. So do those
# that were given back, and what overtakes others of its class is read from here (order.lua).
RESUMED = "resumed"
# Requests that not every worker can serve (capabilities.py). Workers older than this queue never read it.
NEWER = "newer"
INTERACTIVE = "interactive"
PRIORITY_CLASSES = (INTERACTIVE, "batch")  # strict order: a later class is read only when the earlier ones are empty
QUEUE_NAMES = (RESUMED, NEWER, *PRIORITY_CLASSES)


@dataclass(frozen=True, slots=True)
class RedisKeys:
    model_name: str

    def __post_init__(self) -> None:
        if not self.model_name or any(character in "{}" for character in self.model_name):
            raise ValueError(f"served model name {self.model_name!r} must be non-empty and without braces")

    def queue(self, priority_class: str) -> str:
        if priority_class not in (RESUMED, NEWER, *PRIORITY_CLASSES):
            raise ValueError(f"unknown priority class {priority_class!r}; one of {', '.join(PRIORITY_CLASSES)}")
        return self._name(f"q:{priority_class}")

    @property
    def queues(self) -> tuple[str, ...]:
        """Every queue, in the order in which workers read them."""
        return tuple(self.queue(name) for name in QUEUE_NAMES)

    def turns(self, priority_class: str) -> tuple[str, str]:
        """Return the names of turns by entry (order.lua), and of turns and waiting entries by flow (waiting.lua).

        They begin with the name of their queue, which gateways and workers may write.
        """
        queue = self.queue(priority_class)
        return f"{queue}:order", f"{queue}:times"

    def request(self, request_id: str) -> str:
        return self._name(f"r:{request_id}")

    def journal(self, request_id: str) -> str:
        return self._name(f"j:{request_id}")

    def client_name(self, digest: str) -> str:
        """A client's own name for a request; `digest` covers whose it is."""
        return self._name(f"i:{digest}")

    def account(self, owner_key_hash: str) -> str:
        """The account of one API key's requests. Beside the names, which the store's users of before may write too."""
        digest = f"bytes:{owner_key_hash}"  # which no name's is
        return self.client_name(digest)

    def fence(self, worker_id: str) -> str:
        return self._name(f"w:{worker_id}")

    @property
    def held(self) -> tuple[str, str]:
        """The counts of workers with room for requests, and of those with room for the last class."""
        names = [self._name(f"held:{of}") for of in ("any", PRIORITY_CLASSES[-1])]
        return names[0], names[1]

    @property
    def model(self) -> str:
        """The identity of the served model (model_identity.py). Beside the queues, because a worker's store user of
        an older release may write there too."""
        return self._name("q:") + "model"

    @property
    def dead_letters(self) -> str:
        return self._name("dlq")

    @property
    def clock(self) -> str:
        return self._name("clock")

    @property
    def write_probe(self) -> str:
        return self._name("probe")

    @property
    def gateway_channel_prefix(self) -> str:
        return self._name("gw:")

    def gateway_channel(self, gateway_id: str) -> str:
        return self.gateway_channel_prefix + gateway_id

    @property
    def control_channel_prefix(self) -> str:
        return self._name("ctl:")

    def control_channel(self, worker_id: str) -> str:
        return self.control_channel_prefix + worker_id

    @property
    def heartbeat_channel(self) -> str:
        return self._name("hb")

    @property
    def kv_channel(self) -> str:
        return self._name("kv")

    @property
    def kv_watch(self) -> str:
        return self._name("kvw")

    def _name(self, suffix: str) -> str:
        return f"{{{self.model_name}}}:{suffix}"
