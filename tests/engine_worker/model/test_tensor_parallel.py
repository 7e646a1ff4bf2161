"""Networks shared by several processes answer as one does: every family, at sizes that divide heads in every way."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_worker.model.architectures import MODULES
from engine_worker.model.implementation import blueprint
from engine_worker.model.spec import kv_layout
from engine_worker.model.tensor_parallel import SINGLE, TensorParallel
from tests.engine_worker.model.named_weights import BLOCK_SIZE, NamedWeights, step
from tests.engine_worker.model.ranks import Ranks

pytestmark = pytest.mark.tp

SHAPE = {
    "vocab_size": 250, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 6, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "ernie4_5": {"use_bias": True, "tie_word_embeddings": True},
    "glm": {"attention_bias": True},
    "glm4": {},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
                "logits_scaling": 0.5},
    "helium": {"attention_bias": True, "mlp_bias": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None, "tie_word_embeddings": True},
    "phi3": {"partial_rotary_factor": 0.75},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"attention_bias": True},
    "seed_oss": {"attention_out_bias": True},
    "smollm3": {"num_hidden_layers": 4},
}  # fmt: skip
NOT_SHARED = {"olmo2"}
PROMPT = [(7 * index * index + 3) % SHAPE["vocab_size"] for index in range(21)]


def logits(ranks: TensorParallel, config: dict[str, Any]) -> Tensor:
    """Logits of a prompt, of one token after it, and of rows that are asked for on the way."""
    model = blueprint(config, {}, "native").build(NamedWeights(), 64, is_deterministic=False, tensor_parallel=ranks)
    layout = kv_layout(model.spec, BLOCK_SIZE, "float32")
    device = model.attach(torch.zeros(layout.pool_shape(*layout.groups, 5)))
    looked: list[Tensor] = []
    found = [
        model.forward(step(0, PROMPT), device),
        model.forward(step(len(PROMPT), [5]), device),
        model.forward(step(len(PROMPT) + 1, [9, 8]), device, lambda of: looked.append(of(torch.tensor([1, 0])))),
    ]
    return torch.cat([*found, *looked])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


def test_every_family_is_tried() -> None:
    assert set(CASES) | NOT_SHARED == set(MODULES)


# Six heads of keys and values are two or three a rank; two are one that two ranks have.
@pytest.mark.parametrize(("size", "num_kv_heads"), [(2, 6), (3, 6), (4, 2)])
@pytest.mark.parametrize("model_type", CASES)
def test_ranks_answer_as_one_does(ranks: Ranks, model_type: str, size: int, num_kv_heads: int) -> None:
    config = {**SHAPE, "model_type": model_type, "num_key_value_heads": num_kv_heads, **CASES[model_type]}
    expected = logits(SINGLE, config)
    found = ranks.run(size, logits, config)[0]
    # Partial sums are added in another order: 4e-6 of the logits' deviation (1.4; 2.9 of scaled ones) at most.
    assert (found - expected).abs().max() <= 1e-5 * expected.std()
