"""Long runs of a group of two ranks: both compute the same bits, and the way steps run changes no token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_worker.execution.settings import ExecutionSettings
from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.proposers import PROPOSERS
from shared.messages import GenerationRequest
from tests.builders import drafting_by, make_request
from tests.engine_worker.execution.group_runs import Run, add_to, run_watched, tokens_of_runs, write_shape
from tests.engine_worker.model.ranks import Ranks

pytestmark = [pytest.mark.tp, pytest.mark.e2e, pytest.mark.timeout(600)]
ON_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices here")]
# Both ranks hold the single KV head, so their pools are equal if their hidden states are.
SHAPE: dict[str, Any] = {
    "model_type": "llama", "torch_dtype": "bfloat16", "num_attention_heads": 8, "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 8}
LARGE = {"vocab_size": 4000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "head_dim": 128}
MAX_TOKENS = 10_496
DECODES = {"cpu": 40, "cuda": 10_000}
CONFIG: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the model directory for each device type."""
    directory = tmp_path_factory.mktemp("shapes")
    shapes = {"cpu": SMALL, "cuda": LARGE}
    longest = {"max_position_embeddings": MAX_TOKENS}
    return {name: write_shape(directory / name, **SHAPE, **sizes, **longest) for name, sizes in shapes.items()}


def settings_of(model_dirs: dict[str, Path], device: str, **changes: Any) -> ExecutionSettings:
    settings = ExecutionSettings(
        model=model_dirs[device],
        load_format="dummy",
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        tensor_parallel_size=2,
        kv_cache_memory_bytes=2**28 if device == "cuda" else 2**24,
        swap_space_bytes=0,
        num_threads=1,
        **CONFIG,
    )
    return replace(settings, **changes)


def of_lengths(num_tokens: list[int], **sampling: Any) -> list[GenerationRequest]:
    """Return requests with these output lengths, after prompts of several lengths."""
    lengths = (1, 17, 100, 300)
    return [
        make_request(
            [3 + (length + token) % 250 for token in range(length)], f"r{length}", max_tokens=max_tokens, **sampling
        )
        for length, max_tokens in zip(lengths, num_tokens, strict=True)
    ]


@pytest.mark.parametrize(
    ("device", "by_peers"),
    [("cpu", False), *(pytest.param("cuda", by_peers, marks=ON_GPUS) for by_peers in (False, True))],
)
def test_group_both_ranks_compute_same_bits_in_every_step(
    model_dirs: dict[str, Path], device: str, by_peers: bool
) -> None:
    num_decodes = DECODES[device]
    settings = settings_of(model_dirs, device, cudagraph_mode="full_decode_only")
    # Batches of 4, 2, and 1 sequences have graphs of their exact size, so no row is padding.
    output_lengths = [num_decodes // 10, num_decodes // 10, num_decodes // 2, num_decodes]
    requests = of_lengths(output_lengths, ignore_eos=True)
    with Ranks(2, device) as ranks:
        first, second = ranks.run(2, run_watched, settings, by_peers, requests, CONFIG)
    assert {name: len(tokens) for name, tokens in first.tokens.items()} == {
        request.request_id: request.sampling.max_tokens for request in requests
    }
    assert first.num_steps == second.num_steps >= num_decodes
    assert first.checksum == second.checksum != 0
    assert torch.equal(first.pool, second.pool) and first.pool.any()
    assert first.takes_norms == second.takes_norms == by_peers
    assert second.tokens == {}
    print(f"{first.num_steps} steps, sums by {first.all_reduce_path}")


def test_group_drafts_change_no_token(model_dirs: dict[str, Path]) -> None:
    requests = of_lengths([40] * 4, ignore_eos=True, temperature=0.5, seed=3)
    proposer = PROPOSERS["ngram"](SpeculativeConfig(method="ngram", prompt_lookup_min=1))
    drafting = drafting_by(proposer, max_drafts=3, max_samples=16)
    plain, drafted = tokens_of_runs(
        settings_of(model_dirs, "cpu"), [Run(requests, CONFIG), Run(requests, CONFIG | {"drafting": drafting})]
    )
    assert drafted == plain


def test_checksum_detects_one_bit_of_one_step() -> None:
    account, other = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    rows = torch.linspace(-1, 1, 64).to(torch.bfloat16).view(2, 32)
    changed = rows.clone()
    changed.view(torch.int16)[1, 7] ^= 1
    for number in range(2000):
        add_to(account, rows)
        add_to(other, changed if number == 3 else rows)
    assert account[0] != other[0] and account[1] == other[1] == 2000


ALONE = {"max_num_seqs": 1, "max_num_batched_tokens": 256}
IN_CHUNKS = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
AHEAD = {**CONFIG, "async_scheduling": True}


@pytest.mark.parametrize(
    ("device", "is_deterministic"),
    [("cpu", False), *(pytest.param("cuda", flag, marks=ON_GPUS) for flag in (False, True))],
)
def test_group_tokens_do_not_depend_on_how_steps_run(
    model_dirs: dict[str, Path], device: str, is_deterministic: bool
) -> None:
    """Covers graphs and eager steps, single and batched sequences, chunks, and async scheduling.

    With --deterministic, bfloat16 results are equal bit by bit. Otherwise float32 keeps any two logits apart.
    """
    dtype = "bfloat16" if is_deterministic else "float32"
    settings = settings_of(model_dirs, device, dtype=dtype, deterministic=is_deterministic)
    of = {"ignore_eos": True, "temperature": 0.9, "seed": 7} if is_deterministic else {"ignore_eos": True}
    requests = of_lengths([60, 100, 30, 80], **of)
    runs = [Run(requests, config) for config in (CONFIG, ALONE, IN_CHUNKS, AHEAD)]
    modes = ("none", "full_decode_only", "full") if device == "cuda" else ("full_decode_only",)
    found = [tokens for mode in modes for tokens in tokens_of_runs(replace(settings, cudagraph_mode=mode), runs)]
    assert len(found) == len(modes) * len(runs)
    assert all(tokens == found[0] for tokens in found)
    assert {len(tokens) for tokens in found[0].values()} == {60, 100, 30, 80}
