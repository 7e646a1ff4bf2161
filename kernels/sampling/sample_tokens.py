"""One token for each row of scores: the argmax, or a draw after temperature, min-p, top-k and top-p, in this order.

    sample_tokens(scores [N, V], rows) -> (token_ids [N] int64, best [N] float32)

`best` is the row's greatest score. It is not finite where the row could not be sampled (NaN or +inf among the scores,
or every one -inf); the token of such a row is some id of the vocabulary. `rows` is None when every row is an argmax.

A draw is Gumbel-max in two levels: argmax(log(mass of a group) + noise) draws a group of 128 tokens, argmax(log weight
+ noise) the token in it. Exactly the categorical distribution, for V/128 + 128 hashes a row in place of V. The noise
depends on (seed, output index, group or token id) alone: not on the row's place, on other rows, or on the device. So a
CPU and a GPU draw the same token, but for near-ties that fp32 rounding decides. min-p, top-k and top-p each keep a
prefix of the row in descending order; equal scores at the edge are kept together.

CPU tensors go to the reference in reference.py, those on CUDA to cuda.py. A token's way back begins here:
engine_worker/execution/sampler.py calls it with the scores of a step. It knows nothing of sequences, penalties, or of
what a vocabulary means.
"""

from torch import Tensor

from kernels.sampling.reference import SamplingRows, sample_tokens_reference

__all__ = ["SamplingRows", "sample_tokens"]


def sample_tokens(scores: Tensor, rows: SamplingRows | None) -> tuple[Tensor, Tensor]:
    if not scores.is_cuda:
        return sample_tokens_reference(scores, rows)
    from kernels.sampling.cuda import sample_tokens_triton  # noqa: PLC0415 - imports triton, which a CPU has not

    return sample_tokens_triton(scores, rows)
