"""Run a benchmark: `python -m bench` loads a server, `python -m bench NAME` runs one of the programs below."""

import sys
from importlib import import_module

# Imported on demand: some import torch, which the load generator must not.
PROGRAMS = {
    "kernels": "kernel.table",  # each kernel as a fraction of the device's ceilings
    "gpu-check": "kernel.gpu_check",  # each kernel against its float64 reference
    "attention": "kernel.attention",
    "linear": "kernel.linear",
    "skinny-tiles": "kernel.skinny_tiles",  # the fastest tiles of skinny linear layers, for a model or one of its ranks
    "all-reduce": "kernel.all_reduce",  # all-reduces between GPUs of one host
    "w4": "kernel.w4",  # linear layers of 4-bit weights against the read ceiling
    "experts": "kernel.experts",  # a layer of experts against the read ceiling
    "sum-norm": "kernel.sum_norm",  # all-reduce, residual addition and norm in one launch and in two
    "sampling": "kernel.sampling",
    "kv-transfers": "kernel.kv_transfers",  # KV transfers between device and host, and a decode meanwhile
    "engine": "engine.throughput",  # this engine without HTTP, and peers
    "engine-cases": "engine.cases",  # this engine in the cases measured for other engines
    "soak": "engine.soak",  # random traffic on one engine, with integrity checks after each step
    "scheduler-cost": "engine.scheduler_cost",  # host time per step, by batch size
    "step-channel": "engine.step_channel",  # rank 0's cost of sending a step to the other ranks
    "structured": "engine.structured",  # outputs against their schemas, and the cost of masks per step
    "grammar-steps": "engine.grammar_steps",  # whole steps with and without grammars
    "speculation": "engine.speculation",  # what right, wrong and found drafts cost and gain
    "sampling-memory": "engine.sampling_memory",  # random sampling steps against the memory measured at start
    "restarts": "engine.restarts",  # the same bits after restarts with little memory or a cold kernel cache
    "model-impls": "engine.model_impls",  # one model by native code and by transformers
    "pressure-exactness": "engine.pressure_exactness",  # the same tokens with too little KV memory
    "quality": "engine.quality",  # quality of quantized formats: perplexity and top tokens
    "word-perplexity": "quality.word_perplexity",  # formats by lm-eval, compared with transformers (make quality)
    "batch-invariance": "engine.batch_invariance",  # the same bits alone and in a batch
    "http-cases": "serving.http_cases",  # several servers in turn under the same loads
    "http-share": "serving.http_share",  # the share of the engine's speed that remains through HTTP
    "served-exactness": "serving.served_exactness",  # served tokens against transformers
    "two-serves": "serving.two_serves",  # CPU use of an idle server, and of two servers on the same cores
    "takeover": "serving.takeover",  # bf16 texts before and after a worker's death
    "delivery-cost": "serving.delivery_cost",  # CPU time per token between the engine and the client
    "gateway-load": "serving.gateway_load",  # a thousand slow streams through one gateway: delay, CPU time, memory
    "overload": "serving.overload",  # five times the capacity: how fast the surplus is rejected
    "batch-beside-chat": "serving.batch_beside_chat",  # time to first token with and without a batch
    "neighbor": "serving.neighbor",  # what one key's hostile clients cost another key's polite ones
    "key-shares": "serving.key_shares",  # how keys divide a busy worker, by weight
    "request-profile": "serving.request_profile",  # files, functions and calls per token of one streamed chat
    "metrics-cost": "serving.metrics_cost",  # the cost of metrics
    "take-cost": "serving.take_cost",  # server time of TAKE and ACCEPT
    "store-scale": "serving.store_scale",  # the store's processor time for the upkeep of idle workers
    "store-load": "serving.store_load",  # many requests of many keys: memory, and the end of abandoned ones
    "affinity": "serving.affinity",  # cached prompt tokens of workers on one queue, with and without prefix affinity
    "claim-balance": "serving.claim_balance",  # how evenly workers share a burst, and the share of a late worker
    "disconnects": "serving.disconnects",  # clients that disconnect at random: how soon their KV is free
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
        sys.stderr.write(
            f"{program} needs the package {error.name}, which serving does not need; install it with `make dev`\n"
        )
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
