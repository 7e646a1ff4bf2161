"""Two GPUs share a network over NCCL: kernel by kernel and as a CUDA graph, with the same bits on both."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_worker.model.implementation import blueprint
from engine_worker.model.model_input import ModelInput
from engine_worker.model.spec import kv_layout
from engine_worker.model.symmetric_memory import SymmetricMemory
from engine_worker.model.tensor_parallel import ProcessGroup, TensorParallel
from engine_worker.model.weights import RandomWeights
from tests.engine_worker.model.named_weights import step
from tests.engine_worker.model.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.tp,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices here"),
]

# One head of keys and values: both ranks have it, so their pools are equal if their hidden states are.
CONFIG = {
    "model_type": "llama", "vocab_size": 4000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 256,
}  # fmt: skip
PROMPT = list(range(3, 24))
# Of logits whose deviation is 1: rounding to bfloat16 in four layers; products of float32 are exact to 1e-5.
TOLERANCES = {torch.bfloat16: 0.1, torch.float32: 1e-3}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, "cuda") as started:
        yield started


def answers(
    ranks: TensorParallel, dtype: torch.dtype, num_replays: int, is_deterministic: bool, by_peers: bool
) -> dict[str, Any]:
    """The logits of a decoding step, kernel by kernel and after replays of its graph; the pool; seconds a replay.

    `by_peers`: sums go through each other's memory.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    if by_peers:
        ranks = ProcessGroup(device)
        assert ranks.reduce_by(SymmetricMemory(device))
    found = blueprint(CONFIG, {}, "native")
    weights = RandomWeights(device, dtype)
    model = found.build(weights, 256, is_deterministic, tensor_parallel=ranks)
    layout = kv_layout(model.spec, 8, str(dtype).removeprefix("torch."))
    pool = torch.zeros(layout.pool_shape(*layout.groups, 5), dtype=dtype, device=device)
    attached = model.attach(pool)
    model.forward(on(device, step(0, PROMPT)), attached)
    decode = on(device, step(len(PROMPT), [5]))
    eager = model.forward(decode, attached)
    logits = torch.empty(1, CONFIG["vocab_size"], device=device)
    model.forward(decode, attached, logits=logits)
    graph = captured(lambda: model.forward(decode, attached, logits=logits))
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    for _ in range(num_replays):
        graph.replay()
    ended.record()
    ended.synchronize()
    seconds = started.elapsed_time(ended) / 1000 / num_replays
    return {"eager": eager.cpu(), "graph": logits.cpu(), "pool": pool.cpu(), "seconds": seconds}


def captured(run: Any) -> torch.cuda.CUDAGraph:
    """As StepGraphs captures it."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        run()
        graph.capture_end()
    return graph


def on(device: torch.device, model_input: ModelInput) -> ModelInput:
    values = {field.name: getattr(model_input, field.name) for field in fields(model_input)}
    return replace(
        model_input, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    )


@pytest.mark.parametrize("by_peers", [False, True], ids=["nccl", "peers"])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_two_gpus_answer_as_one_does(ranks: Ranks, dtype: torch.dtype, is_deterministic: bool, by_peers: bool) -> None:
    (alone,) = ranks.run(1, answers, dtype, 100, is_deterministic, False)
    first, second = ranks.run(2, answers, dtype, 10_000, is_deterministic, by_peers)
    assert torch.equal(first["graph"], first["eager"])
    assert torch.equal(first["pool"], second["pool"])
    difference = (first["eager"] - alone["eager"]).abs().max() / alone["eager"].std()
    assert difference <= TOLERANCES[dtype]
    print(
        f"{first['seconds'] * 1e6:.0f} us a step of two, {alone['seconds'] * 1e6:.0f} of one; off by {difference:.1e}"
    )
