"""Run random models of every native family against transformers: the long form of `test_families`.

    python -m tests.engine_worker.model.random_families --count 500 --first-seed 1000

Each seed varies one case of `family_cases`: sizes, heads, layer types, windows, rope, biases, experts. A model that is
refused is printed with its sentence. The first difference stops the run, unless --keep-going, and prints its seed.
"""

import argparse
import math
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_worker.model.architectures.config_keys import FULL, SLIDING
from tests.engine_worker.execution.reference import TINY
from tests.engine_worker.model.families import check_schedules, write_family
from tests.engine_worker.model.family_cases import NATIVE, Case

HEAD_DIMS = (8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256)
PARTLY_ROTATED = {"glm", "glm4", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
FLAGS = (
    "attention_bias", "mlp_bias", "use_bias", "tie_word_embeddings", "norm_topk_prob", "use_qk_norm", "conv_bias",
    "mamba_conv_bias", "mamba_proj_bias", "use_conv_bias", "attention_out_bias",
)  # fmt: skip
SIZES = {
    "intermediate_size": 8, "moe_intermediate_size": 4, "shared_intermediate_size": 8, "mamba_d_state": 8,
    "shared_expert_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8, "ssm_state_size": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_head_dim": 4,
}  # fmt: skip
"""The unit of each size."""


def random_case(seed: int) -> tuple[str, Case]:
    """Return a case of family_cases, varied, and its name."""
    source = random.Random(seed)
    name, case = source.choice(sorted(NATIVE.items()))
    config = {**TINY, **case.changes}
    for draw in (_heads, _layers, _sizes, _experts, _states):
        draw(source, config)
    config |= _rope(source, config, case.model_type)
    config["initializer_range"] = 2.0 / math.sqrt(config["hidden_size"])  # as TINY's; larger ones amplify rounding
    config["vocab_size"] = source.randint(200, 1200)
    config |= {key: source.choice((1e-6, 1e-5, 1e-2)) for key in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")}
    for key in FLAGS:
        if key in config and source.random() < 0.5:
            config[key] = not config[key]
    if config.get("sliding_window"):
        config["sliding_window"] = source.randint(1, 80)
    return name, Case(case.model_type, config)


def _heads(source: random.Random, config: dict[str, Any]) -> None:
    """Draw the heads and the size of the hidden state, which is that of all heads if it is so in the case."""
    is_square = config["head_dim"] in {None, config["hidden_size"] / config["num_attention_heads"]}
    num_kv_heads = source.choice((1, 1, 2, 3, 4, 5, 8))
    num_heads = num_kv_heads * source.choice((1, 2, 3, 4, 6, 7, 8))
    head_dim = source.choice(HEAD_DIMS)
    while num_heads * head_dim > 1024:
        num_kv_heads, num_heads, head_dim = 1, math.ceil(num_heads / 2 / num_kv_heads), source.choice(HEAD_DIMS[:8])
    config |= {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    config["head_dim"] = None if config["head_dim"] is None else head_dim
    if is_square:
        config["hidden_size"] = num_heads * head_dim
    else:
        unit = math.lcm(num_heads, 4)  # transformers asks for multiples of the heads; its experts, for 16 bytes
        config["hidden_size"] = unit * source.randint(math.ceil(16 / unit), max(1, 264 // unit))


def _layers(source: random.Random, config: dict[str, Any]) -> None:
    """Draw the number of layers and their types among those of the case."""
    key = next((key for key in ("layer_types", "layers_block_type") if key in config), None)
    if key is None:
        first = 4 if "linear_num_key_heads" in config else 1  # their fourth layer attends
        config["num_hidden_layers"] = source.randint(first, 6)
        return
    types = sorted(set(config[key]) | ({FULL, SLIDING} if SLIDING in config[key] else set()))
    needed = [kind for kind in ("attention", FULL) if kind in types][:1] if len(types) > 1 else []
    drawn = needed + source.choices(types, k=source.randint(1, 5))
    source.shuffle(drawn)
    config[key] = drawn
    if config.get("num_hidden_layers"):
        config["num_hidden_layers"] = len(drawn)
    if "layer_rope_theta" in config:
        config["layer_rope_theta"] = [source.choice((0, 100.0, 10_000.0)) for _ in drawn]


def _sizes(source: random.Random, config: dict[str, Any]) -> None:
    for key, unit in SIZES.items():
        if key in config:
            config[key] = unit * source.randint(1, 16)


def _experts(source: random.Random, config: dict[str, Any]) -> None:
    """Draw experts, groups of them, how many a token takes, and which layers are dense."""
    key = next((key for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), None)
    if key is None:
        return
    num_groups = source.randint(1, 4) if "n_group" in config else 1
    per_group = source.randint(2, 6) if "n_group" in config else source.randint(2, 20)
    config[key] = num_groups * per_group
    if "n_group" in config:
        config |= {"n_group": num_groups, "topk_group": source.randint(1, num_groups)}
    reachable = per_group * config.get("topk_group", 1)
    config["num_experts_per_tok"] = source.randint(1, min(reachable, 8))
    for dense in ("first_k_dense_replace", "num_dense_layers"):
        if dense in config:
            config[dense] = source.randint(0, config["num_hidden_layers"])
    if "mlp_only_layers" in config:
        config["mlp_only_layers"] = [layer for layer in range(config["num_hidden_layers"]) if source.random() < 0.3]
    if "decoder_sparse_step" in config:
        config["decoder_sparse_step"] = source.randint(1, 3)
    if "n_shared_experts" in config:
        config["n_shared_experts"] = source.randint(1, 3)
    if "routed_scaling_factor" in config:
        config["routed_scaling_factor"] = source.choice((1.0, 0.5, 2.5))


def _states(source: random.Random, config: dict[str, Any]) -> None:
    """Draw the heads of recurrent layers and the widths of filters."""
    for key in ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache"):
        if key in config:
            config[key] = source.randint(2, 6)
    if "linear_num_key_heads" in config:
        config["linear_num_key_heads"] = source.randint(1, 4)
        config["linear_num_value_heads"] = config["linear_num_key_heads"] * source.randint(1, 3)
    if "mamba_n_heads" in config:
        inner = 2 * config["hidden_size"]
        config["mamba_n_heads"] = source.choice([heads for heads in range(1, 33) if inner % heads == 0])
    if "mamba_num_heads" in config:
        config["n_groups"] = source.randint(1, 3)
        config["mamba_num_heads"] = config["n_groups"] * source.randint(1, 4)


def _rope(source: random.Random, config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Draw a scaling for a case that states none; for one with factors per frequency, draw these."""
    if "short_factor" in (stated := config.get("rope_parameters", {})):
        num_pairs = int(config["hidden_size"] // config["num_attention_heads"] * stated["partial_rotary_factor"]) // 2
        factors = {key: [source.uniform(1.0, 4.0) for _ in range(num_pairs)] for key in ("short_factor", "long_factor")}
        return {"rope_parameters": {**stated, **factors}}
    if stated or model_type == "phi3" or source.random() < 0.5:
        return {}
    scaling: dict[str, Any] = source.choice([
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": source.choice((2.0, 16.0)), "original_max_position_embeddings": 64,
         "mscale": source.choice((None, 1.0)), "mscale_all_dim": source.choice((None, 0.7))},
    ])  # fmt: skip
    if model_type in PARTLY_ROTATED:
        scaling = {**scaling, "partial_rotary_factor": source.choice((0.25, 0.5, 1.0))}
    return {"rope_parameters": {**scaling, "rope_theta": source.choice((1_000.0, 10_000.0, 5e5))}}


def agrees(case: Case) -> str:
    """Return "" if the model's tokens are those of transformers, else why it was refused."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_family(Path(directory), case)
        try:
            check_schedules(path, must_preempt=False)  # sequences of a short window need few blocks
        except ValueError as refusal:
            return str(refusal)
    return ""


def differences(case: Case) -> Mapping[str, Any]:
    return {key: value for key, value in case.changes.items() if TINY.get(key) != value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="models")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--keep-going", action="store_true", help="print differences and go on")
    options = parser.parse_args()
    num_equal = 0
    for seed in range(options.first_seed, options.first_seed + options.count):
        name, case = random_case(seed)
        try:
            refusal = agrees(case)
        except Exception as error:
            print(f"seed {seed}, {name}: {type(error).__name__}: {error}\n    {differences(case)}", flush=True)
            if not options.keep_going:
                raise
            continue
        num_equal += not refusal
        if refusal:
            print(f"seed {seed}, {name}: refused: {refusal}", flush=True)
    print(f"{num_equal} of {options.count} models agree with transformers")


if __name__ == "__main__":
    main()
