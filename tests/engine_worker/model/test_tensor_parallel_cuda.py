"""Two GPUs share a network over NCCL, with and without a CUDA graph, with the same bits on both."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine_worker.model.implementation import blueprint
from engine_worker.model.model_input import ModelInput
from engine_worker.model.paired_memory import PairedMemory, peer_memory
from engine_worker.model.peer_norm import SharedRows, peer_norm
from engine_worker.model.spec import kv_layout
from engine_worker.model.tensor_parallel import ProcessGroup, TensorParallel
from engine_worker.model.weights import RandomWeights
from kernels.rms_norm import add_rms_norm, add_rms_norm_quantized
from tests.engine_worker.model.named_weights import step
from tests.engine_worker.model.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.tp,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices here"),
]

MAX_ELEMENTS = 2**20  # of a two-rank sum: 2 MiB
# One KV head, which both ranks have, so their pools are equal if their hidden states are.
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 4000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 256,
}  # fmt: skip
PROMPT = list(range(3, 24))
# For logits of deviation 1: bfloat16 rounding in four layers; float32 linear layers are exact to 1e-5.
TOLERANCES = {torch.bfloat16: 0.1, torch.float32: 1e-3}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, "cuda") as started:
        yield started


def answers(
    ranks: TensorParallel, dtype: torch.dtype, num_replays: int, is_deterministic: bool, by_peers: bool
) -> dict[str, Any]:
    """Return the logits of a decode step without and after replays of its graph, the pool, and seconds per replay.

    With `by_peers`, sums use each other's memory, and bfloat16 sums are fused with the following norms.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    if by_peers:
        ranks = ProcessGroup(device)
        assert ranks.reduce_by(peer_memory(device, 2))
        assert ranks.norm_by(peer_norm(device, 2), CONFIG["hidden_size"])
    found = blueprint(CONFIG, {}, "native")
    weights = RandomWeights(device, dtype)
    model = found.build(weights, 256, is_deterministic, tensor_parallel=ranks)
    layout = kv_layout(model.spec, 8, str(dtype).removeprefix("torch."), max_groups=1)
    pool = torch.zeros(layout.pool_shape(5), dtype=dtype, device=device)
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
    """Capture `run` as StepGraphs does."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        run()
        graph.capture_end()
    return graph


def on(device: torch.device, model_input: ModelInput) -> ModelInput:
    values = {field.name: getattr(model_input, field.name) for field in fields(model_input)}
    moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(model_input, **moved)


@pytest.mark.parametrize("by_peers", [False, True], ids=["nccl", "peers"])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_two_gpus_match_one(ranks: Ranks, dtype: torch.dtype, is_deterministic: bool, by_peers: bool) -> None:
    (alone,) = ranks.run(1, answers, dtype, 100, is_deterministic, False)
    first, second = ranks.run(2, answers, dtype, 10_000, is_deterministic, by_peers)
    assert torch.equal(first["graph"], first["eager"])
    assert torch.equal(first["pool"], second["pool"])
    difference = (first["eager"] - alone["eager"]).abs().max() / alone["eager"].std()
    assert difference <= TOLERANCES[dtype]
    print(
        f"{first['seconds'] * 1e6:.0f} us a step of two, {alone['seconds'] * 1e6:.0f} of one; off by {difference:.1e}"
    )


def sums(ranks: ProcessGroup) -> list[bool]:
    """Return whether sums of two ranks have NCCL's bits: all sizes up to the largest, repeatedly, and in graphs."""
    device = torch.device("cuda", torch.cuda.current_device())
    pair, same = PairedMemory(device), []
    for num_elements in (1, 8, 2047, 2048, 2049, 4096, 100_000, MAX_ELEMENTS):
        generator = torch.Generator(device).manual_seed(ranks.rank + num_elements)
        tensor = torch.randn(num_elements, dtype=torch.bfloat16, device=device, generator=generator)
        expected = tensor.clone()
        dist.all_reduce(expected)
        same.append(torch.equal(pair.all_reduce(tensor.clone()), expected))
        repeated = tensor.clone()
        graph = captured(lambda value=repeated: pair.all_reduce(value))
        for _ in range(5):  # uses both buffer slots in turn
            repeated.copy_(tensor)
            graph.replay()
            same.append(torch.equal(repeated, expected))
    assert not pair.serves(torch.empty(MAX_ELEMENTS + 1, dtype=torch.bfloat16, device=device))
    assert not pair.serves(torch.empty(8, dtype=torch.float32, device=device))
    return same


def test_sums_of_two_ranks_have_the_bits_of_nccl(ranks: Ranks) -> None:
    assert all(all(same) for same in ranks.run(2, sums))


def norms_of_sums(ranks: ProcessGroup, hidden: int, num_rows: int) -> list[bool]:
    """Return whether fused sums and norms have the bits of NCCL's sum and the following norm, also in graphs."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = SharedRows(device)
    rows.wait_forever()
    generator = torch.Generator(device).manual_seed(ranks.rank + num_rows)
    part = torch.randn(num_rows, hidden, dtype=torch.bfloat16, device=device, generator=generator)
    residual = torch.linspace(-2, 2, num_rows * hidden, device=device).to(torch.bfloat16).view(num_rows, hidden)
    weight = torch.linspace(0.5, 1.5, hidden, device=device).to(torch.bfloat16)
    summed = part.clone()
    dist.all_reduce(summed)
    expected = add_rms_norm(summed, residual, weight, 1e-5)
    same = []

    def is_same(found: tuple[Tensor, ...]) -> bool:
        return all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))

    for _ in range(4):
        same.append(is_same(rows.add_rms_norm(part, residual, weight, 1e-5)))
    found: list[tuple[Tensor, Tensor]] = []
    graph = captured(lambda: found.extend(rows.add_rms_norm(part, residual, weight, 1e-5) for _ in range(3)))
    for _ in range(50):  # 3 launches each use both slots in turn
        graph.replay()
    same += [is_same(each) for each in found]
    for is_grouped in (False, True):
        wanted, _ = add_rms_norm_quantized(summed, residual, weight, 1e-5, is_grouped)
        quantized, added = rows.add_rms_norm_quantized(part, residual, weight, 1e-5, is_grouped, keeps_plain=True)
        assert quantized.plain is not None
        same.append(torch.equal(quantized.plain, expected[0]))
        same.append(torch.equal(quantized.values.view(torch.uint8), wanted.values.view(torch.uint8)))
        same.append(torch.equal(quantized.scales, wanted.scales) and torch.equal(added, expected[1]))
    assert not rows.serves(torch.empty(257, hidden, dtype=torch.bfloat16, device=device))
    assert not rows.serves(part.float())
    return same


@pytest.mark.parametrize(("hidden", "num_rows"), [(4096, 1), (4096, 256), (8192, 7), (8192, 256), (1024, 33)])
def test_fused_sum_norm_has_the_bits_of_sum_then_norm(ranks: Ranks, hidden: int, num_rows: int) -> None:
    for same in ranks.run(2, norms_of_sums, hidden, num_rows):
        assert all(same), same
