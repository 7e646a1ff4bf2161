"""Short convolutions: hits, chunks, forks and beams change no bit, and what cannot run is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import conv1d
from transformers import AutoModelForCausalLM

from engine_worker.estimate import estimate
from engine_worker.kv.layout import ITEMSIZES
from engine_worker.model.architectures import spec_from_directory, spec_from_json
from engine_worker.model.devices import check_convolutions
from engine_worker.model.sharding import check_tensor_parallel_size
from engine_worker.model.spec import kv_layout
from kernels.short_conv import convolve, read_inputs, store_inputs, window_slots
from shared.messages import StoredChoice, TokenEvent
from tests.builders import Transcript, make_prompt, make_request, run_to_end
from tests.engine_worker.execution.reference import make_engine, make_runner, run_engine_to_end
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE

CASE = "lfm2, wide filters in two parts"
PROMPT = make_prompt(75)
CONFIG: dict[str, Any] = {
    "model_type": "lfm2", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "layer_types": ["conv", "full_attention", "conv"],
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("lfm2"), NATIVE[CASE])


@pytest.mark.parametrize("chunk", [1, 3, 8, 29])
def test_convolution_in_chunks_equals_torch(chunk: int) -> None:
    generator = torch.Generator().manual_seed(3)
    width, channels, block_size, num_tokens = 4, 12, 8, 29
    inputs, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((num_tokens, channels), (channels, width), (channels,))
    )
    cache = torch.full((6, 2, 2, block_size, 3), torch.nan)  # what was never stored must not be read
    table = torch.tensor([[4, 2, 5, 1]], dtype=torch.int32)
    found = []
    for start in range(0, num_tokens, chunk):
        positions = torch.arange(start, min(start + chunk, num_tokens))
        starts = torch.tensor([0, len(positions)], dtype=torch.int32)
        slots, is_before = window_slots(table, starts, positions, block_size, width)
        store_inputs(cache, slots[:, -1], inputs[positions])
        read = read_inputs(cache, slots).masked_fill_(is_before[:, :, None], 0)
        found.append(convolve(read, weight, bias))
    padded = torch.cat((torch.zeros(width - 1, channels), inputs)).double()
    expected = conv1d(padded.T[None], weight.double()[:, None], bias.double(), groups=channels)[0].T
    torch.testing.assert_close(torch.cat(found).double(), expected, atol=1e-6, rtol=1e-6)


def test_prefix_hit_gives_the_bits_of_a_miss(directory: Path) -> None:
    """Prompts share 1 to 75 tokens with a cached one: at, before and after the edges of blocks."""

    def answers(num_shared: int, *, is_cached: bool) -> tuple[list[int], Any, int]:
        runner = make_runner(directory, num_blocks=400, block_size=8, num_threads=1)
        engine = make_engine(runner, max_num_seqs=4, max_num_batched_tokens=16)
        if is_cached:
            run_engine_to_end(engine, [make_request(PROMPT, "first", max_tokens=3, ignore_eos=True)])
        prompt = [*PROMPT[:num_shared], *make_prompt(20, first=500)]
        request = make_request(prompt, "second", max_tokens=6, ignore_eos=True, logprobs=3)
        before = engine.stats().kv_totals.device_hit_tokens
        engine.add_request(request)
        events = [event for _ in iter(lambda: engine.has_work, False) for event in engine.step()]
        engine.check_integrity()
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        found = [token_id for event in tokens for token_id in event.token_ids]
        logprobs = [encoded for event in tokens for encoded in event.logprobs or ()]
        assert len(found) == len(logprobs) == 6
        return found, logprobs, engine.stats().kv_totals.device_hit_tokens - before

    for num_shared in (1, 7, 8, 9, 33, 64, 75):
        hit, miss = answers(num_shared, is_cached=True), answers(num_shared, is_cached=False)
        assert hit[:2] == miss[:2], num_shared
        assert miss[2] == 0 and hit[2] >= num_shared // 8 * 8, num_shared


@pytest.mark.parametrize("max_num_batched_tokens", [8, 64])
def test_beams_match_transformers(directory: Path, max_num_batched_tokens: int) -> None:
    model, width, num_tokens = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), 3, 12
    with torch.inference_mode():
        answers = model.generate(
            torch.tensor([PROMPT]), num_beams=width, num_return_sequences=width, max_new_tokens=num_tokens,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    runner = make_runner(directory, num_blocks=400, block_size=8, num_threads=1)
    engine = make_engine(runner, max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens)
    request = make_request(
        PROMPT, "beams", use_beam_search=True, n=width, beam_width=width, max_tokens=num_tokens, ignore_eos=True
    )
    transcript = run_engine_to_end(engine, [request])
    engine.check_integrity()
    assert [transcript.choice("beams", index) for index in range(width)] == [
        answer[len(PROMPT) :].tolist() for answer in answers
    ]


def test_takeover_continues_with_the_same_tokens(directory: Path) -> None:
    request = make_request(PROMPT, "taken", max_tokens=30, ignore_eos=True)
    runner = make_runner(directory, num_blocks=400, block_size=8, num_threads=1)
    expected = run_engine_to_end(make_engine(runner, max_num_seqs=8, max_num_batched_tokens=16), [request])
    engine, transcript = make_engine(runner, max_num_seqs=8, max_num_batched_tokens=64), Transcript()
    sent = expected.tokens["taken"][:11]
    engine.add_request(request, [StoredChoice(list(sent))])
    transcript.resume("taken", sent)
    assert run_to_end(engine, transcript).tokens == expected.tokens


def test_estimate_counts_layers_of_the_model(directory: Path) -> None:
    spec = spec_from_directory(directory)
    found = estimate(spec, memory_bytes=10**8, block_size=16, max_model_len=256, dtype="float32")
    assert {group.window: group.layers for group in found.kv_groups} == {0: 1, 5: 3}


def test_convolutions_keep_only_their_window() -> None:
    layout = kv_layout(spec_from_json(CONFIG, {}), 16, "float32")
    assert sorted(group.window for group in layout.groups) == [0, 3, 3]
    short, long = (layout.max_blocks(num_tokens, 1) for num_tokens in (1_600, 16_000))
    assert long - short == (16_000 - 1_600) // 16, "only the attention's blocks grow with the sequence"


def test_what_convolutions_cannot_do_is_refused(directory: Path) -> None:
    spec = spec_from_directory(directory)
    check_convolutions(spec, "bfloat16")
    for kv_dtype in (name for name, size in ITEMSIZES.items() if size == 1):
        with pytest.raises(ValueError, match=f"--kv-cache-dtype {kv_dtype}: .*use auto, bf16 or fp32"):
            check_convolutions(spec, kv_dtype)
    with pytest.raises(ValueError, match=r"--tensor-parallel-size may be 1, not 2: .*short convolutions"):
        check_tensor_parallel_size(spec, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv", "mamba", "full_attention"]}, "layer_types has 'mamba'; supported: 'full_attention'"),
        ({"layer_types": ["conv", "full_attention"]}, "layer_types has 2 entries for 3 layers"),
        ({"layer_types": ["conv"] * 3}, "layer_types must have 'full_attention' at least once"),
        ({"conv_L_cache": 0}, "conv_L_cache must be a positive integer"),
    ],
)
def test_invalid_config_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_from_json({**CONFIG, **changes}, {})
