"""What a worker serves, as the store and its peers see it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shared.capabilities import Abilities
from shared.redis_scripts import ALL_ABILITIES


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """The model that a worker serves, the requests that it can serve, and whether others serve it too."""

    identity: Mapping[str, str] = field(default_factory=dict)  # shared/model_identity.py; empty: not compared
    abilities: Abilities = ALL_ABILITIES
    has_peers: Callable[[], bool] = lambda: True
