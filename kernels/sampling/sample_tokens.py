"""Sample one token per row: the argmax, or a draw after temperature, min-p, top-k and top-p, in this order.

A draw is Gumbel-max in two levels: argmax(log(mass) + noise) picks a group of 128 tokens, argmax(log weight + noise)
the token in it. It is exactly the categorical distribution, with V/128 + 128 hashes per row instead of V. The noise
depends only on (seed, output index, group or token id), so a CPU and a GPU draw the same token except for near-ties
decided by float32 rounding.
"""

from torch import Tensor

from kernels.sampling.reference import SamplingRows, sample_tokens_reference

__all__ = ["SamplingRows", "sample_tokens"]


def sample_tokens(scores: Tensor, rows: SamplingRows | None) -> tuple[Tensor, Tensor]:
    """Sample one token per row.

    min-p, top-k and top-p each keep a prefix of the row in descending order; equal scores at the boundary stay
    together.

    Args:
        scores: [N, V], float32, bfloat16 or float16; on CUDA the columns are contiguous.
        rows: Parameters per row; None: every row takes the argmax.

    Returns:
        (token ids [N] int64, best [N] float32), where best is the row's largest score. It is not finite if the row
        cannot be sampled (NaN or +inf among the scores, or all -inf); the token is then arbitrary but valid.
    """
    if not scores.is_cuda:
        return sample_tokens_reference(scores, rows)
    from kernels.sampling.cuda import sample_tokens_triton  # noqa: PLC0415 - imports triton, which a CPU worker lacks

    return sample_tokens_triton(scores, rows)
