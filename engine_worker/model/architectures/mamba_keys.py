"""Read the Mamba-2 layers of config.json, with errors that name the key. Shared by families with such layers."""

import math
from collections.abc import Sequence
from typing import Any

from engine_worker.model.architectures.config_keys import FULL, LINEAR, Config, positive_int
from engine_worker.model.specs.state_space import StateSpaceSpec

_TYPES = {"attention": FULL, "mamba": LINEAR}  # names that files have
_INFINITIES = (math.inf, {"__float__": "Infinity"})  # transformers 5 writes the second
_DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_d_head": "auto",
}  # fmt: skip


def layer_types_with_mamba(config: Config) -> list[str]:
    """Return layer_types in transformers' names; without it, no layer attends."""
    return transformers_types(config.get("layer_types") or [LINEAR] * positive_int(config, "num_hidden_layers"))


def transformers_types(layer_types: Sequence[str]) -> list[str]:
    """Return layer types in transformers' names."""
    return [_TYPES.get(kind, kind) for kind in layer_types]


def refuse_step_limits(config: Config) -> None:
    """Refuse limits of the step of a state.

    Raises:
        ValueError: If config.json has some.
    """
    limit = config.get("time_step_limit")
    if limit is not None and (len(limit) != 2 or limit[0] != 0 or limit[1] not in _INFINITIES):
        raise ValueError(f"config.json: time_step_limit = {limit!r} is not supported; only [0, Infinity] is")


def heads_and_groups(config: Config, heads: str, groups: str) -> tuple[int, int]:
    """Return the numbers of heads and of groups, which share their inputs, from the keys of these names.

    Raises:
        ValueError: If one is missing, or heads are no multiple of groups.
    """
    num_heads, num_groups = positive_int(config, heads), positive_int(config, groups)
    if num_heads % num_groups:
        raise ValueError(f"config.json: {heads} {num_heads} must be a multiple of {groups} {num_groups}")
    return num_heads, num_groups


def state_space_spec(config: Config) -> StateSpaceSpec:
    """Return the state space of each Mamba-2 layer.

    Raises:
        ValueError: If a number is missing or does not divide another, or steps are limited.
    """
    config = {**_DEFAULTS, **config}
    num_heads, num_groups = heads_and_groups(config, "mamba_n_heads", "mamba_n_groups")
    size = positive_int(config, "mamba_expand") * positive_int(config, "hidden_size")
    head_dim = size // num_heads if config["mamba_d_head"] == "auto" else positive_int(config, "mamba_d_head")
    if num_heads * head_dim != size:
        raise ValueError(
            f"config.json: mamba_n_heads {num_heads} heads of mamba_d_head {head_dim} must be mamba_expand * "
            f"hidden_size, {size}"
        )
    refuse_step_limits(config)
    return StateSpaceSpec(
        num_groups=num_groups,
        num_heads=num_heads,
        state_dim=positive_int(config, "mamba_d_state"),
        head_dim=head_dim,
        width=positive_int(config, "mamba_d_conv"),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        bias=bool(config.get("mamba_proj_bias")),
    )
