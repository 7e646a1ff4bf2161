"""The checks of bench gpu-check as tests on a machine with a GPU: bf16, fp16 and fp32 at the serving shapes."""

import pytest
import torch

from bench.engine.sampling_memory import measure
from bench.kernel.cases import Check
from bench.kernel.gpu_check import all_checks
from bench.kernel.sampling import run_checks
from kernels.moe.shared_gate import add_gated, add_gated_reference
from kernels.recurrent import triton_kernels
from kernels.sampling.log_normalizers import log_normalizers, top_scores
from kernels.sampling.token_counts import apply_penalties, count_drawn, new_counts, recount
from kernels.token_bitmask import apply_token_bitmask, apply_token_bitmask_reference
from tests.kernels import recurrent_cases, short_conv_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CHECKS = all_checks()


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_gpu_kernel_equals_the_float64_reference(check: Check) -> None:
    for error in check(torch.Generator(device="cuda").manual_seed(0)):
        assert error.passed, error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", recurrent_cases.SHAPES)
def test_gpu_recurrent_operators_equal_torch_in_float64(name: str, dtype: torch.dtype) -> None:
    recurrent_cases.check(triton_kernels.TritonRecurrent(), recurrent_cases.SHAPES[name], dtype, "cuda")
    recurrent_cases.check_mamba(triton_kernels.TritonRecurrent(), recurrent_cases.SHAPES[name], dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_deterministic_chunks_change_no_bit_of_a_state(dtype: torch.dtype) -> None:
    recurrent_cases.check_chunks(triton_kernels.TritonRecurrent(is_deterministic=True), dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_cuts_of_prompts_at_multiples_of_64_change_no_bit_of_a_state(dtype: torch.dtype) -> None:
    recurrent_cases.check_chunks_of_64(triton_kernels.TritonRecurrent(), dtype, "cuda")


def test_gpu_short_convolution_equals_torch() -> None:
    short_conv_cases.check("cuda")


def test_gpu_gated_shared_expert_equals_the_reference() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    outputs, shared, x = (torch.randn(7, 2048, device="cuda", generator=generator).bfloat16() for _ in range(3))
    weight = torch.randn(2048, device="cuda", generator=generator).bfloat16() / 32
    found = add_gated(outputs, shared, x, weight)
    torch.testing.assert_close(found, add_gated_reference(outputs, shared, x, weight))


def test_gpu_sampling_equals_the_reference() -> None:
    failed = [result for result in run_checks() if not result["passed"]]
    assert not failed


@pytest.mark.parametrize("vocab_size", [1000, 49152, 128256])
def test_gpu_token_masks_equal_the_reference(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(32, vocab_size, generator=generator).bfloat16()
    masks = torch.randint(-(2**31), 2**31, (20, -(-vocab_size // 32)), dtype=torch.int32, generator=generator)
    rows = torch.randperm(32, generator=generator)[:20].int()
    found = scores.cuda()
    apply_token_bitmask(found, rows.cuda(), masks.cuda())
    apply_token_bitmask_reference(scores, rows, masks)
    assert torch.equal(found.cpu(), scores)


@pytest.mark.parametrize("vocab_size", [1000, 49_152, 151_937])
def test_token_counts_on_the_gpu_equal_the_reference(vocab_size: int) -> None:
    """Counts by atomic additions, and penalties bit by bit, with tokens that stand in one row thousands of times."""
    generator = torch.Generator().manual_seed(vocab_size)
    token_ids = torch.randint(vocab_size, (90_000,), dtype=torch.int32, generator=generator)
    token_ids[20_000:60_000] = 7
    spans = torch.tensor([[0, 20_000, 20_000, 90_000], [0, 20_000, 80_000, 90_000], [5, 5, 5, 5]], dtype=torch.int32)
    rows = torch.tensor([4, 1, 2], dtype=torch.int32)
    penalties = torch.tensor([[1.3, 0.0, 0.0], [1.0, 0.1, -0.7], [0.9, -0.25, 1.1]])
    scores = torch.randn(3, vocab_size, generator=generator)
    drawn = torch.randint(vocab_size, (3,), generator=generator)
    score_rows = torch.tensor([2, 0, 1], dtype=torch.int32)
    results = []
    for device in (torch.device("cuda"), torch.device("cpu")):
        counts = new_counts(5, vocab_size, device).fill_(77)
        here = [tensor.to(device) for tensor in (rows, token_ids, spans, score_rows, drawn, penalties)]
        rows_here, token_ids_here, spans_here, score_rows_here, drawn_here, penalties_here = here
        recount(counts, rows_here, token_ids_here, spans_here)
        count_drawn(counts, rows_here, score_rows_here, drawn_here)
        penalized = scores.to(device, copy=True)
        apply_penalties(penalized, score_rows_here, counts, rows_here, penalties_here)
        results.append((counts.cpu()[:, :vocab_size], penalized.cpu()))
    (found, found_scores), (expected, expected_scores) = results
    assert torch.equal(found, expected) and torch.equal(found_scores, expected_scores)


@pytest.mark.parametrize("vocab_size", [1000, 49_152, 151_936])
def test_log_probabilities_on_the_gpu_equal_float64(vocab_size: int) -> None:
    scores = 4 * torch.randn(70, vocab_size, device="cuda")
    scores[3, ::2] = -torch.inf
    best, log_sums = log_normalizers(scores)
    exact = scores.double().logsumexp(-1)
    assert torch.allclose((best + log_sums).double(), exact, atol=4e-6)  # two roundings of numbers below 32
    alone = [log_normalizers(scores[row : row + 1])[1] for row in range(0, 70, 9)]
    assert torch.equal(torch.cat(alone), log_sums[::9])
    values, token_ids = top_scores(scores, 20)
    assert torch.equal(values, scores.topk(20).values) and torch.equal(scores.gather(1, token_ids), values)


def test_sampling_takes_no_more_memory_than_was_measured() -> None:
    """`python -m bench sampling-memory` runs 10,000 steps."""
    assert measure(200, 300, 151_936)["passed"]
