"""The number of gateways for `pagestream serve --gateways auto`, and the reason in a few words.

A gateway is one process with one event loop and handles about 30,000 streamed tokens per second, as many as two GPU
workers produce with an 8B model. A worker on a CPU produces some hundreds. One worker gets one gateway, because the
`/metrics` of a shared port are those of one gateway only. Each worker and the store need a core, so gateways use the
remaining ones.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagestream.serve_settings import MAX_GATEWAYS, PassedFlags

GATEWAYS_PER_GPU_WORKER = 2  # with several workers


@dataclass(frozen=True)
class GatewayCount:
    number: int
    reason: str = ""  # empty if --gateways set the number


def count_gateways(
    configured: int | None, *, num_workers: int, gpus: Sequence[str], num_cores: int, counts_for_keys: bool
) -> GatewayCount:
    """Choose the number of gateways.

    Args:
        configured: Value of --gateways, or None for auto.
        num_workers: Number of workers.
        gpus: GPUs that workers use; empty on a CPU.
        num_cores: Cores that this process may use.
        counts_for_keys: Whether gateways count the limits of API keys.
    """
    if configured is not None:
        return GatewayCount(configured)
    if not gpus:
        return GatewayCount(1, "enough for workers on a CPU")
    if num_workers == 1:
        return GatewayCount(1, "enough for one worker, up to 30,000 tokens/s; --gateways N for more")
    if counts_for_keys:
        return GatewayCount(1, "each gateway counts the limits of API keys alone; --gateways N for more tokens/s")
    wanted, spare = GATEWAYS_PER_GPU_WORKER * num_workers, num_cores - num_workers - 1
    number = max(1, min(wanted, spare, MAX_GATEWAYS))
    if number < wanted:
        return GatewayCount(number, f"{num_cores} cores, of which {num_workers + 1} are for workers and the store")
    return GatewayCount(number, f"{GATEWAYS_PER_GPU_WORKER} per GPU worker")


def counts_for_keys(flags: PassedFlags, environ: Mapping[str, str], config_path: Path | None) -> bool:
    """Return whether the gateways get a key file, which may contain limits, by flag, variable, or --config."""
    if flags.gateway_has("--api-keys-file") or environ.get("PAGESTREAM_API_KEYS_FILE"):
        return True
    content = tomllib.loads(config_path.read_text(encoding="utf-8")) if config_path else {}
    return any(name.replace("-", "_") == "api_keys_file" for name in content.get("gateway", {}))
