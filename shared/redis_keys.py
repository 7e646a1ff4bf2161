"""Names of all streams, groups, channels, and keys in Redis.

All names of a served model have the hash tag `{model name}`, so that a script with several of them works in a cluster.
With --store-namespace the tag is `{namespace|model name}`. No other code builds a name, except Lua scripts, which
append an id to a prefix. docs/internals/store-protocol.md lists what the keys contain.
"""

import re
from dataclasses import dataclass

GROUP = "engine"

# Requests of a dead worker wait here. It is read first, because their clients already have a part of the answer. Also
# for requests that a worker returned, and for requests that fair queueing reads out of order (order.lua).
RESUMED = "resumed"
# Requests that not every worker can serve (capabilities.py). Older workers do not read it.
NEWER = "newer"
INTERACTIVE = "interactive"
PRIORITY_CLASSES = (INTERACTIVE, "batch")  # strict priority: a class is read only if the earlier ones are empty
QUEUE_NAMES = (RESUMED, NEWER, *PRIORITY_CLASSES)
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{0,64}")


def store_namespace(text: str) -> str:
    """Return a namespace as it is.

    Raises:
        ValueError: If it has other characters than names may have.
    """
    if not _NAMESPACE.fullmatch(text):
        raise ValueError(f"expected up to 64 letters, digits, '.', '_' and '-'; got {text!r}")
    return text


@dataclass(frozen=True, slots=True)
class RedisKeys:
    model_name: str
    namespace: str = ""

    def __post_init__(self) -> None:
        if not self.model_name or any(character in "{}" for character in self.model_name):
            raise ValueError(f"served model name: expected a non-empty name without braces, got {self.model_name!r}")

    def queue(self, priority_class: str) -> str:
        if priority_class not in (RESUMED, NEWER, *PRIORITY_CLASSES):
            raise ValueError(f"priority class: expected one of {', '.join(PRIORITY_CLASSES)}; got {priority_class!r}")
        return self._name(f"q:{priority_class}")

    @property
    def queues(self) -> tuple[str, ...]:
        """Return all queues, in the order in which workers read them."""
        return tuple(self.queue(name) for name in QUEUE_NAMES)

    def turns(self, priority_class: str) -> tuple[str, str]:
        """Return two names: start numbers by entry (order.lua), and start number and waiting entries by flow.

        They begin with the name of their queue, which gateways and workers have permission to write.
        """
        queue = self.queue(priority_class)
        return f"{queue}:order", f"{queue}:times"

    def request(self, request_id: str) -> str:
        return self._name(f"r:{request_id}")

    def journal(self, request_id: str) -> str:
        return self._name(f"j:{request_id}")

    def client_name(self, digest: str) -> str:
        """Return the key of a client's own name for a request. `digest` includes the API key."""
        return self._name(f"i:{digest}")

    def account(self, owner_key_hash: str) -> str:
        """Return the account of an API key's requests. It is a client name, which older store users may write."""
        digest = f"bytes:{owner_key_hash}"  # differs from all digests of names
        return self.client_name(digest)

    def limits(self, owner_key_hash: str) -> str:
        """Return what an API key has left of its limits per minute. It is a client name, as the account."""
        digest = f"limits:{owner_key_hash}"
        return self.client_name(digest)

    def fence(self, worker_id: str) -> str:
        return self._name(f"w:{worker_id}")

    @property
    def held(self) -> tuple[str, str]:
        """Return the sorted sets of workers with free slots, for all classes and for the last class."""
        names = [self._name(f"held:{of}") for of in ("any", PRIORITY_CLASSES[-1])]
        return names[0], names[1]

    @property
    def model(self) -> str:
        """Return the key of the served model's identity (model_identity.py).

        It has the prefix of queues, which store users of older workers may write.
        """
        return self._name("q:") + "model"

    @property
    def homes(self) -> str:
        """Return the key of the table of homes (homes.lua). It has the prefix of queues, as that of the model."""
        return self._name("q:") + "homes"

    @property
    def dead_letters(self) -> str:
        return self._name("dlq")

    @property
    def clock(self) -> str:
        return self._name("clock")

    @property
    def beats(self) -> str:
        """Return the sorted set of workers by their last beat (tick.lua). It has the prefix of queues, as the model."""
        return self._name("q:") + "beats"

    @property
    def observer(self) -> str:
        """Return the lease of the worker that looks for dead ones. It has the prefix of queues, as the model."""
        return self._name("q:") + "observer"

    @property
    def born(self) -> str:
        """Return when the store was new, by the fleet clock. It has the prefix of queues, as the model."""
        return self._name("q:") + "born"

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

    @property
    def hash_tag(self) -> str:
        """Return the part of all names, in braces, that decides on their slot in a cluster."""
        return f"{self.namespace}|{self.model_name}" if self.namespace else self.model_name

    def _name(self, suffix: str) -> str:
        return f"{{{self.hash_tag}}}:{suffix}"
