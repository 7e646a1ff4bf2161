"""Read the experts of config.json, with errors that name the key. Shared by families with experts."""

from typing import Any

from engine_worker.model.architectures.config_keys import Config, positive_int
from engine_worker.model.specs.experts import RouterSpec


def router_spec(config: Config, key: str = "num_experts", **traits: Any) -> RouterSpec:
    """Return a router; `key` is config.json's number of experts, or `num_local_experts`, its name since version 5.

    Raises:
        ValueError: If a number is missing, or a token has more experts than there are.
    """
    key = key if key in config else "num_local_experts"
    num_experts, top_k = positive_int(config, key), positive_int(config, "num_experts_per_tok")
    if top_k > num_experts:
        raise ValueError(f"config.json: num_experts_per_tok must be 1 to {num_experts} ({key}), not {top_k}")
    return RouterSpec(num_experts=num_experts, top_k=top_k, **traits)
