"""Networks sharded over processes match one process: every family, at sizes that divide heads in every way."""

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer

from engine_worker.model.architectures import MODULES, spec_from_directory, spec_from_json
from engine_worker.model.implementation import blueprint, blueprint_from_directory
from engine_worker.model.network import Network
from engine_worker.model.served_model import check_options
from engine_worker.model.sharding import tensor_parts
from engine_worker.model.spec import ModelSpec, kv_layout
from engine_worker.model.specs.part import NOTHING, Part
from engine_worker.model.tensor_parallel import SINGLE, ProcessGroup, SingleRank, TensorParallel
from engine_worker.model.weights import SafetensorsWeights
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import Case
from tests.engine_worker.model.fp8_checkpoints import LAYOUTS, write_fp8
from tests.engine_worker.model.named_weights import BLOCK_SIZE, NamedWeights, attached, step
from tests.engine_worker.model.ranks import Ranks

pytestmark = pytest.mark.tp

SHAPE = {
    "vocab_size": 250, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 6, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 12, "linear_num_value_heads": 24, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
SHARED_EXPERT = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "ernie4_5": {"use_bias": True, "tie_word_embeddings": True},
    "gemma2": {"sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
               "query_pre_attn_scalar": 20},
    "gemma3_text": {"sliding_window": 5, "sliding_window_pattern": 2, "attention_bias": True},
    "glm": {"attention_bias": True},
    "glm4": {},
    "glm4_moe": {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
                "logits_scaling": 0.5},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 24, "mamba_n_groups": 12, "mamba_d_state": 8,
        "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
    },
    "granite_swa": {"attention_multiplier": 0.2, "sliding_window": 6,
                    "layer_types": ["full_attention", "sliding_attention"]},
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 2, "residual_multiplier": 0.4},
    "helium": {"attention_bias": True, "mlp_bias": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "ministral": {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
    "ministral3": {"rope_parameters": {"rope_theta": 1e4, "original_max_position_embeddings": 8,
                                       "llama_4_scaling_beta": 0.5}},
    "mistral": {"sliding_window": None, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "nemotron_h": {
        "hybrid_override_pattern": "M-*E", "n_groups": 12, "mamba_num_heads": 24, "mamba_head_dim": 12,
        "ssm_state_size": 8, "mlp_bias": True, "n_routed_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 48,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 9},
    "olmoe": {"num_experts": 7, "num_experts_per_tok": 3},
    "phi3": {"partial_rotary_factor": 0.75},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"attention_bias": True},
    "qwen3_5_moe_text": {**DELTA, **SHARED_EXPERT},
    "qwen3_5_text": DELTA,
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]},
    "qwen3_next": {**DELTA, **SHARED_EXPERT, "mlp_only_layers": [0]},
    "seed_oss": {"attention_out_bias": True},
    "smollm3": {"num_hidden_layers": 4},
}  # fmt: skip
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 4, 8, 16, 32, 64,",
)
PROMPT = [(7 * index * index + 3) % SHAPE["vocab_size"] for index in range(21)]


def three_steps(ranks: TensorParallel, config: dict[str, Any], is_deterministic: bool = False) -> list[Tensor]:
    """Return the logits of a prompt, of one token after it, of two more, and of rows requested inside the step."""
    model = blueprint(config, {}, "native").build(NamedWeights(), 64, is_deterministic, tensor_parallel=ranks)
    layout = kv_layout(model.spec, BLOCK_SIZE, "float32", max_groups=1)
    device = attached(model, layout)
    looked: list[Tensor] = []
    found = [
        model.forward(step(0, PROMPT), device),
        model.forward(step(len(PROMPT), [5]), device),
        model.forward(step(len(PROMPT) + 1, [9, 8]), device, lambda of: looked.append(of.logits(torch.tensor([1, 0])))),
    ]
    return [*found, *looked]


def logits(ranks: TensorParallel, config: dict[str, Any]) -> Tensor:
    return torch.cat(three_steps(ranks, config))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


ONE_RANK = {"lfm2", "lfm2_moe"}  # ranks cannot share short convolutions, and several are refused


def test_every_family_has_a_case() -> None:
    assert set(CASES) == set(MODULES) - ONE_RANK


# Six KV heads are two or three per rank; two KV heads are one per pair of ranks.
@pytest.mark.parametrize(("size", "num_kv_heads"), [(2, 6), (3, 6), (4, 2)])
@pytest.mark.parametrize("model_type", CASES)
def test_tensor_parallel_matches_one_rank(ranks: Ranks, model_type: str, size: int, num_kv_heads: int) -> None:
    config = {**SHAPE, "model_type": model_type, "num_key_value_heads": num_kv_heads, **CASES[model_type]}
    expected = logits(SINGLE, config)
    found = ranks.run(size, logits, config)[0]
    # Partial sums in another order: at most 1.04e-5 of the logits' deviation (1.4; 2.9 of scaled ones), on two CPUs.
    assert (found - expected).abs().max() <= 2e-5 * expected.std()


# Six experts are two or three per rank.
SIX_EXPERTS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 3},
    "nemotron_h": {
        "hybrid_override_pattern": "E*E",
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 25,
        "moe_shared_expert_intermediate_size": 48,
        "mamba_num_heads": 24,
        "mamba_head_dim": 12,
    },
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 1, "moe_intermediate_size": 25, "mlp_only_layers": [0]},
}


def expert_parallel_logits(ranks: TensorParallel, config: dict[str, Any]) -> Tensor:
    found = blueprint(config, {}, "native", enable_expert_parallel=True)
    model, layout = found.build(NamedWeights(), 64, False, ranks), kv_layout(found.share(ranks.size), 8, "float32")
    return model.forward(step(0, PROMPT), attached(model, layout))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("model_type", SIX_EXPERTS)
def test_expert_parallel_matches_one_rank(ranks: Ranks, model_type: str, size: int) -> None:
    config = {**SHAPE, "model_type": model_type, **SIX_EXPERTS[model_type]}
    expected = expert_parallel_logits(SINGLE, config)
    found = ranks.run(size, expert_parallel_logits, config)[0]
    assert (found - expected).abs().max() <= 1e-5 * expected.std()


def test_ranks_share_whole_experts_if_columns_would_cut_a_tile() -> None:
    config = {**SHAPE, "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2}
    spec = spec_from_json({**config, "moe_intermediate_size": 128}, {})
    names = "model.layers.1.mlp.experts.5.down_proj.weight", "model.layers.1.mlp.experts.0.down_proj.weight"
    columns, whole = tensor_parts(spec, 1, 2), tensor_parts(spec, 1, 3)
    assert [columns[name] for name in names] == [Part(1, ((64, 128),))] * 2
    assert [whole.get(name) for name in names] == [NOTHING, NOTHING]  # rank 1 of 3 has experts 2 and 3
    assert "model.layers.1.mlp.experts.2.down_proj.weight" not in whole


def test_experts_that_do_not_divide_are_refused() -> None:
    config = {**SHAPE, "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2}
    config |= {"moe_intermediate_size": 24}
    with pytest.raises(ValueError, match=r"--tensor-parallel-size may be 1, not 2: .* 5 experts of 24"):
        blueprint(config, {}, "native", enable_expert_parallel=True).check_tensor_parallel_size(2)


def test_expert_parallel_needs_a_model_with_experts() -> None:
    found = blueprint({**SHAPE, "model_type": "llama"}, {}, "native", enable_expert_parallel=True)
    with pytest.raises(ValueError, match="--enable-expert-parallel: the model has no experts"):
        check_options(found, {"enable_expert_parallel": True})


def expert_parallel_tokens(ranks: TensorParallel, directory: Path) -> tuple[int, list[int]]:
    """Return the bytes that a rank reads of a checkpoint, and the likeliest token after each prompt token."""
    weights = SafetensorsWeights(directory, torch.device("cpu"), torch.float32, lambda share, detail: None)
    found = blueprint_from_directory(directory, enable_expert_parallel=True)
    model, layout = found.build(weights, 64, False, ranks), kv_layout(found.share(ranks.size), 8, "float32")
    logits = model.forward(step(0, PROMPT), attached(model, layout))
    return weights.read_bytes, ranks.broadcast(logits.argmax(-1)).tolist()


@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoe"])
def test_each_expert_is_read_by_one_rank(ranks: Ranks, name: str, tmp_path: Path) -> None:
    changes = {"num_experts": 6, "num_local_experts": 6, "hidden_size": 96, "moe_intermediate_size": 24}
    directory = write_family(tmp_path, Case(name, {**changes, "num_experts_per_tok": 2, "head_dim": None}))
    all_bytes, expected = expert_parallel_tokens(SINGLE, directory)
    found = ranks.run(2, expert_parallel_tokens, directory)
    assert [tokens for _, tokens in found] == [expected] * 2
    assert max(read for read, _ in found) < 0.8 * all_bytes


class Rank(SingleRank):
    """One of several ranks, without the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("model_type", CASES)
def test_rank_loads_tensors_of_its_shape(model_type: str) -> None:
    config = {**SHAPE, "model_type": model_type, **CASES[model_type]}
    found = blueprint(config, {}, "native")
    weights = NamedWeights()
    found.build(weights, 64, is_deterministic=False, tensor_parallel=Rank(0, 3))
    assert weights.loaded_bytes == 4 * found.share(3).num_parameters()


def keys_and_values(ranks: TensorParallel, config: dict[str, Any]) -> Tensor:
    model = blueprint(config, {}, "native").build(NamedWeights(), 64, is_deterministic=False, tensor_parallel=ranks)
    layout = kv_layout(model.spec, BLOCK_SIZE, "float32", max_groups=1)
    pool = torch.zeros(layout.pool_shape(5))
    model.forward(step(0, PROMPT), model.attach(pool))
    return pool


@pytest.mark.parametrize("size", [2, 3, 4])
def test_hidden_states_are_identical_on_every_rank(ranks: Ranks, size: int) -> None:
    """Observed by the keys and values of one KV head, which all ranks compute and store."""
    config = {**SHAPE, "model_type": "llama", "num_key_value_heads": 1}
    first, *others = ranks.run(size, keys_and_values, config)
    assert first.count_nonzero() and all(torch.equal(pool, first) for pool in others)


def read_and_greedy(
    ranks: TensorParallel, directory: Path, prompts: list[list[int]], num_tokens: int
) -> tuple[int, list[list[int]]]:
    """Return the bytes that a rank reads of a checkpoint, and the greedy tokens after each prompt, sent by rank 0."""
    weights = SafetensorsWeights(directory, torch.device("cpu"), torch.float32, lambda share, detail: None)
    found = blueprint_from_directory(directory)
    model = found.build(weights, 64, is_deterministic=False, tensor_parallel=ranks)
    layout = kv_layout(model.spec, BLOCK_SIZE, "float32", max_groups=1)
    device = attached(model, layout, 9)
    answers = []
    for prompt in prompts:
        token_ids, first, tokens = prompt, 0, list[int]()
        for _ in range(num_tokens):
            logits = model.forward(step(first, token_ids), device)
            likeliest = ranks.broadcast(logits[-1:].argmax(-1))
            first, token_ids = first + len(token_ids), likeliest.tolist()
            tokens += token_ids
        answers.append(tokens)
    return weights.read_bytes, answers


@pytest.mark.timeout(600)
def test_three_ranks_of_the_demo_model_match_one(ranks: Ranks, demo_model_dir: Path) -> None:
    """Nine heads divide by three. The checkpoint is read once, except the embedding and norms, which all ranks have."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    expected_bytes, expected = read_and_greedy(SINGLE, demo_model_dir, prompts, 8)
    assert len({tuple(tokens) for tokens in expected}) == len(TEXTS)
    found = ranks.run(3, read_and_greedy, demo_model_dir, prompts, 8)
    assert [tokens for _, tokens in found] == [expected] * 3
    spec = spec_from_directory(demo_model_dir)
    replicated = 2 * (spec.vocab_size + 2 * spec.num_layers + 1) * spec.hidden_size  # bfloat16
    assert expected_bytes == 2 * spec.num_parameters()
    assert sum(read for read, _ in found) == expected_bytes + 2 * replicated
    assert expected_bytes / 3 < min(read for read, _ in found) < replicated + expected_bytes / 3


FP8_CASES = {
    "llama": Case("llama", {"hidden_size": 160, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4,
                            "num_key_value_heads": 4, "attention_bias": True}),
    "phi3": Case("phi3", {"hidden_size": 256, "intermediate_size": 512, "head_dim": None, "num_attention_heads": 4,
                          "num_key_value_heads": 4}),
}  # fmt: skip


def fp8_logits(ranks: TensorParallel, directory: Path) -> Tensor:
    weights = SafetensorsWeights(directory, torch.device("cpu"), torch.float32, lambda share, detail: None)
    model = blueprint_from_directory(directory).build(weights, 64, is_deterministic=False, tensor_parallel=ranks)
    layout = kv_layout(model.spec, BLOCK_SIZE, "float32", max_groups=1)
    return model.forward(step(0, PROMPT), attached(model, layout))


@pytest.mark.parametrize("family", FP8_CASES)
@pytest.mark.parametrize("name", ["compressed-tensors, rows", "fp8, blocks", "fp8, tensors, static"])
def test_ranks_shard_fp8_weights_with_their_scales(ranks: Ranks, name: str, family: str, tmp_path: Path) -> None:
    model = write_fp8(tmp_path, LAYOUTS[name], FP8_CASES[family])
    expected = fp8_logits(SINGLE, model.exact)
    assert torch.equal(fp8_logits(SINGLE, model.directory), expected)
    found = ranks.run(2, fp8_logits, model.directory)[0]
    # Partial sums in another order, over five times as many elements as above: at most 1.1e-5.
    assert (found - expected).abs().max() <= 3e-5 * expected.std()


def operations(ranks: TensorParallel, shards: list[Tensor], vocab_size: int) -> dict[str, Any]:
    mine = shards[ranks.rank]
    given = torch.full((len(mine), vocab_size), torch.nan)
    return {
        "sum": ranks.all_reduce(mine.clone()),
        "sum in order": ranks.all_reduce_in_order(mine.clone()),
        "a row in order": ranks.all_reduce_in_order(mine[5:6].clone()),
        "no rows": ranks.all_reduce_in_order(ranks.all_reduce(mine[:0])),
        "gathered": ranks.gather_logits(mine, vocab_size),
        "written": ranks.gather_logits(mine, vocab_size, given),
        "no logits": ranks.gather_logits(mine[:0], vocab_size),
        "of rank 0": ranks.broadcast(mine.clone()),
        "smallest": ranks.minimum(10 - ranks.rank),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_return_the_expected_values(ranks: Ranks, size: int, dtype: torch.dtype) -> None:
    shards = [torch.randn(64, 24, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]
    vocab_size = 24 * size - 5
    by_rank = ranks.run(size, operations, shards, vocab_size)
    in_order = reduce(torch.add, shards)
    for rank, found in enumerate(by_rank):
        assert torch.equal(found["sum"], by_rank[0]["sum"])
        # Each addition rounds once, at values below 8.
        torch.testing.assert_close(found["sum"], in_order, rtol=0, atol=(size - 1) * 8 * torch.finfo(dtype).eps)
        assert torch.equal(found["sum in order"], in_order)
        assert torch.equal(found["a row in order"], in_order[5:6])
        assert found["no rows"].shape == (0, 24)
        assert torch.equal(found["of rank 0"], shards[0])
        assert found["smallest"] == 10 - (size - 1)
        whole = torch.cat(shards, dim=1)[:, :vocab_size]
        assert torch.equal(found["gathered"], whole if rank == 0 else shards[rank])
        assert torch.equal(found["written"], whole if rank == 0 else shards[rank])
        assert found["no logits"].shape == (0, vocab_size if rank == 0 else 24)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.names.append(str(operator))
        return operator(*arguments, **(options or {}))


@pytest.mark.parametrize("model_type", CASES)
def test_single_rank_launches_no_extra_kernels(model_type: str) -> None:
    found = blueprint({**SHAPE, "model_type": model_type, **CASES[model_type]}, {}, "native")
    by_network = []
    assert isinstance(found.shape, ModelSpec)
    for model in (Network(found.shape, NamedWeights(), 64), found.build(NamedWeights(), 64, False, SINGLE)):
        layout = kv_layout(model.spec, BLOCK_SIZE, "float32", max_groups=1)
        device = attached(model, layout)
        with Operators() as operators:
            model.forward(step(0, PROMPT), device)
        by_network.append(operators.names)
    assert by_network[0] == by_network[1]


def test_single_rank_uses_no_collectives() -> None:
    shards = [torch.randn(8, 24)]
    found = operations(SINGLE, shards, 24)
    assert found.pop("smallest") == 10
    assert all(torch.equal(found[name], shards[0]) for name in ("sum", "sum in order", "gathered", "of rank 0"))


class Peers:
    """Sums by gathering, for tensors of up to 256 elements; `error` is added on one rank."""

    name = "gathering"

    def __init__(self, ranks: TensorParallel, error: float) -> None:
        self.ranks, self.error, self.calls = ranks, error, 0

    def serves(self, tensor: Tensor) -> bool:
        return tensor.dtype == torch.bfloat16 and tensor.numel() <= 256

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.calls += 1
        return self.ranks.all_reduce_in_order(tensor.clone()).add_(self.error)


def sums_by_peers(ranks: ProcessGroup, error: float) -> tuple[bool, int, Tensor, str]:
    """Return whether peer sums are used, how many of two sums per step use them, one such sum, and the path's name."""
    other = ProcessGroup(torch.device("cpu"))
    peers = Peers(ranks, error if ranks.rank == 1 else 0.0)
    is_taken = other.reduce_by(peers)
    calls_before = peers.calls
    found = other.all_reduce(torch.full((4, 24), 1.0 + ranks.rank, dtype=torch.bfloat16))
    other.all_reduce(torch.ones(8, 96, dtype=torch.bfloat16))
    return is_taken, peers.calls - calls_before, found, other.all_reduce_path


@pytest.mark.parametrize(("error", "is_taken"), [(0.0, True), (2.0**-9, False), (4.0, False), (float("nan"), False)])
def test_peer_sums_are_used_when_all_ranks_pass_the_test(ranks: Ranks, error: float, is_taken: bool) -> None:
    for taken, calls, found, path in ranks.run(4, sums_by_peers, error):
        assert (taken, calls) == (is_taken, int(is_taken))
        assert path == ("gathering" if is_taken else "gloo")
        assert torch.equal(found, torch.full((4, 24), 10.0, dtype=torch.bfloat16))
