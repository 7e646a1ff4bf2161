"""python -m bench: load a server (serving/load_generator.py); python -m bench NAME: one of the programs below."""

import sys
from importlib import import_module

# Imported when asked for: some import torch, which the load generator must not.
PROGRAMS = {
    "kernels": "kernel.table",  # each kernel as a fraction of what the device reaches
    "gpu-check": "kernel.gpu_check",  # each kernel against its float64 reference
    "attention": "kernel.attention",
    "linear": "kernel.linear",
    "skinny-tiles": "kernel.skinny_tiles",  # the fastest tiles of products of few rows, for a model or a rank of it
    "all-reduce": "kernel.all_reduce",  # sums between GPUs of one host
    "sum-norm": "kernel.sum_norm",  # such a sum with the norm behind it, in one launch and in two
    "sampling": "kernel.sampling",
    "kv-transfers": "kernel.kv_transfers",  # KV to host memory and back, and a decode beside it
    "engine": "engine.throughput",  # our engine without HTTP, and transformers beside it
    "engine-cases": "engine.cases",  # our engine in the cases in which others were measured
    "soak": "engine.soak",  # random traffic on one engine, its state checked after each step
    "scheduler-cost": "engine.scheduler_cost",  # the host's time for a step, by batch size
    "step-channel": "engine.step_channel",  # what telling the other ranks of a step costs rank 0
    "structured": "engine.structured",  # outputs against their schemas, and what the masks cost a step
    "grammar-steps": "engine.grammar_steps",  # whole steps with and without grammars
    "model-impls": "engine.model_impls",  # one model by our code and by that of transformers
    "pressure-exactness": "engine.pressure_exactness",  # the same tokens with too little KV memory
    "quality": "engine.quality",  # what fewer bits cost: perplexity and likeliest tokens
    "word-perplexity": "quality.word_perplexity",  # formats by lm-eval, beside transformers (make quality)
    "batch-invariance": "engine.batch_invariance",  # the same bits alone and among others
    "http-cases": "serving.http_cases",  # servers in turn under the same loads
    "http-share": "serving.http_share",  # what of the engine's speed is left through HTTP
    "served-exactness": "serving.served_exactness",  # what is served against what transformers says
    "two-serves": "serving.two_serves",  # what a server takes idle, and beside a second one on the same cores
    "takeover": "serving.takeover",  # texts of bf16 before and behind a worker's death
    "delivery-cost": "serving.delivery_cost",  # CPU time of a token between the engine and the client
    "gateway-load": "serving.gateway_load",  # a thousand slow streams through one gateway: delay, CPU time, memory
    "overload": "serving.overload",  # five times what fits: how fast the rest is refused
    "batch-beside-chat": "serving.batch_beside_chat",  # first tokens with and without a batch behind them
    "neighbour": "serving.neighbour",  # what one key's hostile clients cost another key's polite ones
    "metrics-cost": "serving.metrics_cost",  # what it costs to be observed
    "claim-balance": "serving.claim_balance",  # how evenly workers share a burst, and what a late one gets of it
    "disconnects": "serving.disconnects",  # clients that leave at random: how soon their KV is free
    "summarize": "summarize",  # bench/results/TOPIC.json from raw results
    "plots": "plots",  # the pictures of docs/benchmarks
}


OURS = {"bench", "engine_worker", "gateway", "kernels", "pagestream", "shared"}


def main(argv: list[str]) -> int:
    name, arguments = (argv[0], argv[1:]) if argv and argv[0] in PROGRAMS else ("", argv)
    module = PROGRAMS.get(name, "serving.load_generator")
    try:
        return int(import_module(f"bench.{module}").main(arguments))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in OURS:
            raise
        program = f"bench {name}".rstrip()
        sys.stderr.write(f"{program} needs the package {error.name}, which serving does not: install it (make dev)\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
