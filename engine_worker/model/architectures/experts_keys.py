"""Read the experts of config.json, with errors that name the key. Shared by families with experts."""

from typing import Any

from engine_worker.model.architectures.config_keys import Config, number_of, positive_int
from engine_worker.model.specs.experts import RouterSpec, Scoring


def router_spec(config: Config, key: str = "num_experts", **traits: Any) -> RouterSpec:
    """Return a router; `key` is config.json's number of experts, or `num_local_experts`, its name since version 5.

    Raises:
        ValueError: If a number is missing, or a token has more experts than there are.
    """
    key = "num_local_experts" if key not in config and "num_local_experts" in config else key
    num_experts, top_k = positive_int(config, key), positive_int(config, "num_experts_per_tok")
    if top_k > num_experts:
        raise ValueError(f"config.json: num_experts_per_tok must be 1 to {num_experts} ({key}), not {top_k}")
    return RouterSpec(num_experts=num_experts, top_k=top_k, **traits)


def grouped_router_spec(config: Config) -> RouterSpec:
    """Return a router with sigmoid scores, a correction bias, and groups of experts (arXiv:2412.19437, section 2.1.2).

    Raises:
        ValueError: As router_spec(), or if the experts cannot be divided into the groups.
    """
    config = {"n_group": 1, "topk_group": 1, **config}
    num_groups, num_chosen = positive_int(config, "n_group"), positive_int(config, "topk_group")
    router = router_spec(
        config,
        "n_routed_experts",
        scoring=Scoring.SIGMOID,
        renormalize=bool(config.get("norm_topk_prob", True)),
        scale=number_of(config, "routed_scaling_factor", 1.0),
        num_groups=num_groups,
        num_chosen_groups=num_chosen,
        correction_bias=True,
    )
    if router.num_experts % num_groups or router.top_k > router.num_experts // num_groups * num_chosen:
        raise ValueError(
            f"config.json: n_group {num_groups} must divide n_routed_experts {router.num_experts}, and topk_group "
            f"{num_chosen} groups must have num_experts_per_tok {router.top_k} experts"
        )
    return router
