"""The gated delta rule and Mamba-2 over 64 tokens at a time, by matrix products: for prompts.

With g the sums of the logarithms of decay since the start of a chunk and S the state there, token i writes u_i, and

    o_i = exp(g_i) q_i S + sum over j <= i of exp(g_i - g_j) (q_i k_j) u_j
    S'  = exp(g_64) S + sum over j of exp(g_64 - g_j) k_j u_j

In Mamba-2, u_j is the step times x_j (https://arxiv.org/abs/2405.21060, section 6). In the gated delta rule, u solves
(I + L) u = beta (v - exp(g) k S) with L_ij = beta_i exp(g_i - g_j) (k_i k_j) below the diagonal
(https://arxiv.org/abs/2412.06464, section 3.3). One kernel computes what does not depend on the state, for all chunks
at once; another one goes from chunk to chunk.

Chunks start at multiples of 64 of the sequence's positions, so cuts there change no bit.
Matrices that are not of the model's dtype are multiplied as the sum of two bfloat16 terms, which has 16 bits.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.recurrent.recurrence import Recurrence, softplus
from kernels.recurrent.reference import L2_EPS

CHUNK = 64  # tokens; fewer are as fast one by one
_COLUMNS = 32  # of a state that a program updates
_WARPS = 4
_STAGES = 3  # of loads; with 1, Triton 3.6's program reads outside of its tensors
_MIN_SIZE, _MAX_KEY_DIM = 16, 128  # of tl.dot; of 128 x 128, the stages take 217 KiB of shared memory


@triton.jit
def _terms_of(x, TERM: tl.constexpr):
    """Return two terms of x: of bfloat16, with the first 16 bits of x; of float32, x and 0."""
    high = x.to(TERM)
    return high, (x - high.to(tl.float32)).to(TERM)


@triton.jit
def _dot(a, b, total=None):
    return tl.dot(a, b, total, input_precision="tf32x3")


@triton.jit
def _chunk_at(starts, seq_lens, sequence, number, CHUNK: tl.constexpr):
    """Return the first and last row of a sequence, and the row where its chunk `number` starts, maybe before them."""
    start = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1)
    return start, end, start - (tl.load(seq_lens + sequence) - (end - start)) % CHUNK + number * CHUNK


@triton.jit
def _heads_at(qkv, row, columns, inside, TERM: tl.constexpr):
    """Return columns of qkv at rows, and zeros outside."""
    return tl.load(qkv + row[:, None] + columns[None, :], mask=inside[:, None], other=0.0).to(TERM)


@triton.jit
def _unit_factor(x, EPS: tl.constexpr):
    exact = x.to(tl.float32)
    return tl.rsqrt(tl.sum(exact * exact, 1) + EPS)


@triton.jit
def _matrices_at(matrices, row, head, NUM_HEADS: tl.constexpr, IS_DELTA: tl.constexpr, CHUNK: tl.constexpr):
    """Return the place of the first matrix of a chunk: both terms of the scores, then those of the inverse."""
    place = (row.to(tl.int64) * NUM_HEADS + head) * ((4 if IS_DELTA else 2) * CHUNK)
    return matrices + place[:, None] + tl.arange(0, CHUNK)[None, :]


@triton.jit
def _store_terms(place, x, inside, CHUNK: tl.constexpr, TERM: tl.constexpr):
    high, low = _terms_of(x, TERM)
    tl.store(place, high, mask=inside[:, None])
    tl.store(place + CHUNK, low, mask=inside[:, None])


@triton.jit
def _dot_of_computed(a, b, TERM: tl.constexpr):
    high, low = _terms_of(a, TERM)
    other_high, other_low = _terms_of(b, TERM)
    return _dot(high, other_high, _dot(high, other_low, _dot(low, other_high)))


@triton.jit
def _inverse_of(lower, CHUNK: tl.constexpr, TERM: tl.constexpr):
    """Return the inverse of I + L, for L strictly below the diagonal, given transposed.

    The rows of the four blocks of 16 on the diagonal, D, are solved beside each other. With N = L - D and
    M = inverse(I + D) N, whose fourth power is 0, the inverse is (I - M + M M - M M M) inverse(I + D).
    """
    SIZE: tl.constexpr = CHUNK // 4
    index = tl.arange(0, CHUNK)
    is_one = index[:, None] == index[None, :]
    is_block = index[:, None] // SIZE == index[None, :] // SIZE
    blocks = tl.where(is_one, 1.0, 0.0)
    for at in range(1, SIZE):
        factors = tl.sum(tl.where(is_block & (index[None, :] % SIZE == at), lower, 0.0), 1)
        change = tl.sum(factors[:, None] * blocks, 0)
        blocks = tl.where(is_block & (index[:, None] % SIZE == at), blocks - change[None, :], blocks)
    once = _dot_of_computed(blocks, tl.trans(tl.where(is_block, 0.0, lower)), TERM)
    twice = _dot_of_computed(once, once, TERM)
    series = tl.where(is_one, 1.0, 0.0) - once + twice - _dot_of_computed(once, twice, TERM)
    return _dot_of_computed(series, blocks, TERM)


@triton.jit(do_not_specialize=["num_tokens"])
def _within_chunks_kernel(
    qkv, gates, decay, step_bias, matrices, factors, starts, seq_lens, qkv_stride, num_tokens,
    GATE_STRIDE: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    IS_DELTA: tl.constexpr, CHUNK: tl.constexpr, TERM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    start, end, chunk = _chunk_at(starts, seq_lens, sequence, tl.program_id(0), CHUNK)
    if (end - start >= CHUNK) & (chunk < end):
        index = tl.arange(0, CHUNK)
        row = chunk + index
        inside = (row >= start) & (row < end)
        columns = head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM + tl.arange(0, KEY_DIM)
        query = _heads_at(qkv, row.to(tl.int64) * qkv_stride, columns, inside, TERM)
        key = _heads_at(qkv, row.to(tl.int64) * qkv_stride, NUM_KEY_HEADS * KEY_DIM + columns, inside, TERM)
        gate = gates + row.to(tl.int64) * GATE_STRIDE + head
        STEP_AT: tl.constexpr = NUM_HEADS if IS_DELTA else 0
        step = tl.load(gate + STEP_AT, mask=inside, other=0.0).to(tl.float32) + tl.load(step_bias + head)
        share = tl.where(inside, softplus(step), 0.0)
        sums = tl.cumsum(tl.load(decay + head) * share, 0)
        total = tl.sum(tl.where(index == CHUNK - 1, sums, 0.0), 0)
        if IS_DELTA:
            of_query, of_key = _unit_factor(query, EPS) * (KEY_DIM**-0.5), _unit_factor(key, EPS)
        else:
            of_query, of_key = tl.full((CHUNK,), 1.0, tl.float32), share
        matrix = _matrices_at(matrices, row, head, NUM_HEADS, IS_DELTA, CHUNK)
        scores = _dot(query, tl.trans(key)) * of_query[:, None] * of_key[None, :]
        ahead = index[:, None] - index[None, :]
        scores *= tl.exp(tl.where(ahead >= 0, sums[:, None] - sums[None, :], -float("inf")))
        _store_terms(matrix, scores, inside, CHUNK, TERM)
        factor = factors + head * 4 * num_tokens + row
        tl.store(factor, tl.exp(sums) * of_query, mask=inside)
        tl.store(factor + num_tokens, tl.exp(sums) * of_key, mask=inside)
        tl.store(factor + 2 * num_tokens, tl.exp(total - sums) * of_key, mask=inside)
        tl.store(factor + 3 * num_tokens, tl.exp(total) + tl.zeros_like(sums), mask=inside)
        if IS_DELTA:
            beta = tl.where(inside, tl.sigmoid(tl.load(gate, mask=inside, other=0.0).to(tl.float32)), 0.0)
            # Transposed: row j and column i.
            lower = _dot(key, tl.trans(key)) * of_key[:, None] * (of_key * beta)[None, :]
            lower *= tl.exp(tl.where(ahead < 0, sums[None, :] - sums[:, None], -float("inf")))
            _store_terms(matrix + 2 * CHUNK, _inverse_of(lower, CHUNK, TERM) * beta[None, :], inside, CHUNK, TERM)


@triton.jit(do_not_specialize=["num_tokens"])
def _between_chunks_kernel(
    qkv, skip, matrices, factors, out, states, state_blocks, starts, seq_lens, qkv_stride, num_tokens, state_stride,
    NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr, CHUNK: tl.constexpr, TERM: tl.constexpr,
):  # fmt: skip
    """Run Mamba-2 with `skip`, the gated delta rule without it."""
    IS_DELTA: tl.constexpr = skip is None
    head, sequence = tl.program_id(1), tl.program_id(2)
    start, end, first = _chunk_at(starts, seq_lens, sequence, 0, CHUNK)
    if end - start >= CHUNK:
        block = tl.load(state_blocks + sequence)
        keys, index = tl.arange(0, KEY_DIM), tl.arange(0, CHUNK)
        columns = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
        place = states + block.to(tl.int64) * state_stride + head * (KEY_DIM * VALUE_DIM)
        place += keys[:, None] * VALUE_DIM + columns[None, :]
        state = tl.load(place)
        keys += head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM
        columns += head * VALUE_DIM
        for chunk in range(first, end, CHUNK):
            row = chunk + index
            inside = (row >= start) & (row < end)
            query = _heads_at(qkv, row.to(tl.int64) * qkv_stride, keys, inside, TERM)
            key = _heads_at(qkv, row.to(tl.int64) * qkv_stride, NUM_KEY_HEADS * KEY_DIM + keys, inside, TERM)
            value = _heads_at(qkv, row.to(tl.int64) * qkv_stride, 2 * NUM_KEY_HEADS * KEY_DIM + columns, inside, TERM)
            factor = factors + head * 4 * num_tokens + row
            of_query = tl.load(factor, mask=inside, other=0.0)
            of_key = tl.load(factor + num_tokens, mask=inside, other=0.0)
            remaining = tl.load(factor + 2 * num_tokens, mask=inside, other=0.0)
            matrix = _matrices_at(matrices, row, head, NUM_HEADS, IS_DELTA, CHUNK)
            scores = tl.load(matrix, mask=inside[:, None], other=0.0)
            low_scores = tl.load(matrix + CHUNK, mask=inside[:, None], other=0.0)
            high, low = _terms_of(state, TERM)
            mixed = _dot(query, high, _dot(query, low)) * of_query[:, None]
            if IS_DELTA:
                known = _dot(key, high, _dot(key, low)) * of_key[:, None]
                inverse = tl.load(matrix + 2 * CHUNK, mask=inside[:, None], other=0.0)
                low_inverse = tl.load(matrix + 3 * CHUNK, mask=inside[:, None], other=0.0)
                high, low = _terms_of(value.to(tl.float32) - known, TERM)
                written = _dot(inverse, high, _dot(inverse, low, _dot(low_inverse, high)))
                high, low = _terms_of(written, TERM)
                mixed = _dot(scores, high, _dot(scores, low, _dot(low_scores, high, mixed)))
            else:
                written = value.to(tl.float32)
                mixed += written * tl.load(skip + head)
                mixed = _dot(scores, value, _dot(low_scores, value, mixed))
            target = out + row.to(tl.int64)[:, None] * (NUM_HEADS * VALUE_DIM) + columns[None, :]
            tl.store(target, mixed.to(out.dtype.element_ty), mask=inside[:, None])
            total = tl.load(factors + head * 4 * num_tokens + 3 * num_tokens + tl.maximum(chunk, start))
            high, low = _terms_of(written * remaining[:, None], TERM)
            state = _dot(tl.trans(key), high, _dot(tl.trans(key), low, state * total))
        if block != 0:
            tl.store(place, state)


def has_chunks(work: Recurrence) -> bool:
    """Return whether these kernels serve this layer: in bfloat16, on GPUs with 227 KiB of shared memory per program."""
    if work.qkv.device.type != "cuda":  # the interpreter, and compilation for Hopper
        return True
    fits = _MIN_SIZE <= work.heads.key_dim <= _MAX_KEY_DIM and work.columns(_COLUMNS) >= _MIN_SIZE
    return fits and work.qkv.dtype == torch.bfloat16 and _compute_capability(work.qkv.device)[0] in (9, 10)


@cache
def _compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def run_in_chunks(work: Recurrence, out: Tensor) -> None:
    """Write the outputs [T, value_size] of the sequences that have at least CHUNK tokens in this step."""
    heads, batch, columns, num_tokens = work.heads, work.batch, work.columns(_COLUMNS), len(work.qkv)
    num_sequences, num_matrices = len(batch.state_blocks), 1 if work.skip is not None else 2
    # A matrix or factor of a chunk is stored by the rows of its tokens.
    term, device = torch.bfloat16 if work.qkv.dtype == torch.bfloat16 else torch.float32, work.qkv.device
    matrices = torch.empty((num_tokens, heads.num_heads, num_matrices, 2, CHUNK), dtype=term, device=device)
    factors = torch.empty((heads.num_heads, 4, num_tokens), device=device)
    sequences = (batch.query_start_loc, batch.seq_lens, work.qkv.stride(0), num_tokens)
    shape = {
        "NUM_KEY_HEADS": heads.num_key_heads, "NUM_HEADS": heads.num_heads, "KEY_DIM": heads.key_dim,
        "CHUNK": CHUNK, "TERM": tl.bfloat16 if term is torch.bfloat16 else tl.float32,
    }  # fmt: skip
    num_chunks = triton.cdiv(batch.max_query_len - 1, CHUNK) + 1  # the first one may be cut
    _within_chunks_kernel[num_chunks, heads.num_heads, num_sequences](
        work.qkv, work.gates, work.rates.decay, work.rates.step_bias, matrices, factors, *sequences,
        **shape, GATE_STRIDE=work.gates.stride(0), IS_DELTA=work.skip is None, EPS=L2_EPS,
        num_warps=_WARPS,
    )  # fmt: skip
    _between_chunks_kernel[heads.value_dim // columns, heads.num_heads, num_sequences](
        work.qkv, work.skip, matrices, factors, out, work.states, batch.state_blocks, *sequences,
        work.states.stride(0), **shape, VALUE_DIM=heads.value_dim, VALUES=columns,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
