"""How many gateways `pagestream serve` runs where nobody says (`--gateways auto`), and the reason in a few words.

A gateway is one process with one event loop: it ends near 30,000 streamed tokens a second, which two workers on GPUs
make with an 8B model. A worker on a CPU makes some hundreds. One worker gets one gateway, because the `/metrics` of a
shared port are those of one gateway only; a small model that makes more than a gateway streams wants `--gateways 2`.
Each worker and the store need a core of their own, so gateways take those that are left.

It is asked once, at the start of `serve`. It knows counts alone: no process and no port.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagestream.serve_settings import MAX_GATEWAYS, PassedFlags

GATEWAYS_A_GPU_WORKER = 2  # of several


@dataclass(frozen=True)
class GatewayCount:
    number: int
    reason: str = ""  # empty where somebody told the number


def count_gateways(
    told: int | None, *, num_workers: int, gpus: Sequence[str], num_cores: int, counts_for_keys: bool
) -> GatewayCount:
    """`told`: by --gateways; `gpus`: that workers see, none on a CPU; `num_cores`: that this process may use;
    `counts_for_keys`: whether a gateway counts what keys may spend."""
    if told is not None:
        return GatewayCount(told)
    if not gpus:
        return GatewayCount(1, "enough for workers on a CPU")
    if num_workers == 1:
        return GatewayCount(1, "enough for one worker, up to 30,000 tokens/s; --gateways N for more")
    if counts_for_keys:
        return GatewayCount(1, "each counts the limits of API keys by itself; --gateways N for more tokens a second")
    wanted, spare = GATEWAYS_A_GPU_WORKER * num_workers, num_cores - num_workers - 1
    number = max(1, min(wanted, spare, MAX_GATEWAYS))
    if number < wanted:
        return GatewayCount(number, f"{num_cores} cores, of which {num_workers + 1} are for workers and the store")
    return GatewayCount(number, f"{GATEWAYS_A_GPU_WORKER} for each worker on a GPU")


def counts_for_keys(flags: PassedFlags, environ: Mapping[str, str], config_path: Path | None) -> bool:
    """Whether the gateways are given a file of keys, which may have limits: by flag, variable or --config."""
    if flags.gateway_has("--api-keys-file") or environ.get("PAGESTREAM_API_KEYS_FILE"):
        return True
    content = tomllib.loads(config_path.read_text(encoding="utf-8")) if config_path else {}
    return any(name.replace("-", "_") == "api_keys_file" for name in content.get("gateway", {}))
