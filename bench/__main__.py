"""python -m bench: load a server (bench/load_generator.py); python -m bench NAME: one of the programs below."""

import sys
from importlib import import_module

# Imported when asked for: some import torch, which the load generator must not.
PROGRAMS = {
    "engine": "bench.engine",  # our engine without HTTP, and transformers beside it
    "engine-cases": "bench.engine_cases",  # our engine in the cases in which others were measured
    "soak": "bench.soak",  # random traffic on one engine, its books checked after each step
    "http-cases": "bench.http_cases",  # servers in turn under the same loads
    "delivery-cost": "bench.delivery_cost",  # CPU time of a token between the engine and the client
    "gateway-load": "bench.gateway_load",  # a thousand slow streams through one gateway: delay, CPU time, memory
    "overload": "bench.overload",  # five times what fits: how fast the rest is refused
    "batch-beside-chat": "bench.batch_beside_chat",  # first tokens of a chat load with and without a batch behind it
    "disconnects": "bench.disconnects",  # clients that leave at random: how soon their KV is free
    "kernels": "bench.kernel_table",  # each kernel as a fraction of what the device reaches
    "kv-transfers": "bench.kv_transfers",  # KV to host memory and back, and a decode beside it
    "pressure-exactness": "bench.pressure_exactness",  # the same tokens with too little KV memory
    "plots": "bench.plots",  # the pictures of docs/benchmarks.md
}


def main(argv: list[str]) -> int:
    if argv and argv[0] in PROGRAMS:
        return int(import_module(PROGRAMS[argv[0]]).main(argv[1:]))
    from bench.load_generator import main as load_main  # noqa: PLC0415

    return load_main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
