"""Choose the experts of each token and sort the pairs: two or three launches, no atomics, no host synchronization.

Logits of up to 512 tokens are computed in quarters, by many programs; those of more tokens by the programs that choose.
Up to 8 tokens, one program chooses and sorts. For more, each program chooses the experts of a few tokens and counts
them, and each of the last launch places their pairs: at 64 tokens and 256 experts one program would take 49 us (H200).
The sums of a logit have one order for any T. Of equal scores the lower id is chosen. A shared expert costs no lane of
the choice: its pairs follow all others, and its gate is one more logit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.moe.reference import route_reference
from kernels.moe.routing import BLOCK_FIELDS, Router, Routing, empty_routing

_BLOCK_T = 16  # rows of an mma
_MAX_SORTED_AT_ONCE = 8  # tokens
_MAX_QUARTERED = 512  # tokens
_CHOSEN_AT_ONCE = 4  # tokens of a program, if their logits are there
_CHOSEN = tl.constexpr(-(2**63))  # less than each key


@triton.jit
def _product(
    x, weight, tokens, experts, first, num_tokens, total,
    HIDDEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_K: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Add the product of BLOCK_K inputs."""
    columns = first + tl.arange(0, BLOCK_K)
    of_x = (tokens < num_tokens)[:, None] & (columns < HIDDEN)[None, :]
    of_weight = (columns < HIDDEN)[:, None] & (experts < NUM_EXPERTS)[None, :]
    left = tl.load(x + tokens[:, None] * HIDDEN + columns[None, :], mask=of_x, other=0.0)
    right = tl.load(weight + experts[None, :] * HIDDEN + columns[:, None], mask=of_weight, other=0.0)
    if WIDENS:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _logits_of(
    x, weight, bias, first_token, num_tokens,
    HIDDEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Return the float32 logits of all experts, each the sum of four chains as in _route_few_kernel."""
    tokens, experts = first_token + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    a = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    b = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    c = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    d = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for first in range(0, HIDDEN, 4 * BLOCK_K):
        a = _product(x, weight, tokens, experts, first, num_tokens, a, HIDDEN, NUM_EXPERTS, BLOCK_K, WIDENS)
        b = _product(x, weight, tokens, experts, first + BLOCK_K, num_tokens, b, HIDDEN, NUM_EXPERTS, BLOCK_K, WIDENS)
        c = _product(
            x, weight, tokens, experts, first + 2 * BLOCK_K, num_tokens, c, HIDDEN, NUM_EXPERTS, BLOCK_K, WIDENS
        )
        d = _product(
            x, weight, tokens, experts, first + 3 * BLOCK_K, num_tokens, d, HIDDEN, NUM_EXPERTS, BLOCK_K, WIDENS
        )
    return _with_bias((a + b) + (c + d), bias, NUM_EXPERTS, BLOCK_E)


@triton.jit
def _with_bias(logits, bias, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Add the bias; logits beyond NUM_EXPERTS become -inf."""
    experts = tl.arange(0, BLOCK_E)
    if bias is not None:
        logits += tl.load(bias + experts, mask=experts < NUM_EXPERTS, other=0.0).to(tl.float32)[None, :]
    return tl.where((experts < NUM_EXPERTS)[None, :], logits, float("-inf"))


@triton.jit
def _sort_keys(scores, ids, NUM_IDS: tl.constexpr):
    """Return int64 keys in the order of the scores, where the lower of two equal scores' ids has the larger key."""
    scores = tl.where(scores == scores, scores, float("-inf"))  # NaN  # noqa: PLR0124
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (NUM_IDS - 1 - ids).to(tl.int64)


@triton.jit
def _in_chosen_groups(
    choice, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Return the choice scores with -inf outside the groups with the largest sums of their two best scores."""
    experts = tl.arange(0, BLOCK_E)
    groups = tl.zeros([BLOCK_T, BLOCK_E], tl.int32) + (experts // GROUP_SIZE)[None, :]
    keys = _sort_keys(choice, experts[None, :], BLOCK_E)
    sums = tl.full([BLOCK_T, BLOCK_E], float("-inf"), tl.float32)  # the same for each expert of a group
    for group in tl.static_range(NUM_GROUPS):
        own = groups == group
        own_keys = tl.where(own, keys, _CHOSEN)
        is_first = own_keys == tl.max(own_keys, axis=1)[:, None]
        rest = tl.where(is_first, _CHOSEN, own_keys)
        is_second = (rest == tl.max(rest, axis=1)[:, None]) & own & ~is_first
        best = tl.sum(tl.where((is_first | is_second) & own, choice, 0.0), axis=1)
        sums = tl.where(own, best[:, None], sums)
    group_keys = _sort_keys(sums, groups, BLOCK_E)
    kept = tl.zeros([BLOCK_T, BLOCK_E], tl.int32)
    for _ in tl.static_range(NUM_CHOSEN):
        is_best = group_keys == tl.max(group_keys, axis=1)[:, None]
        kept = tl.where(is_best, 1, kept)
        group_keys = tl.where(is_best, _CHOSEN, group_keys)
    return tl.where(kept > 0, choice, float("-inf"))


@triton.jit
def _exact_sum(scores):
    """Return the float32 sum of each row of scores from 0 to 1, in units of 2^-50: exact, so no layout changes it."""
    units = tl.sum((scores * 1125899906842624.0).to(tl.int64), axis=1)
    return units.to(tl.float32) * (1.0 / 1125899906842624.0)


@triton.jit
def _choose(
    logits, correction_bias, scale,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, IS_SIGMOID: tl.constexpr, DIVIDES_BY_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Return (chosen [BLOCK_T, BLOCK_E], int32 of 0 and 1; float32 weights). Logits beyond NUM_EXPERTS are -inf."""
    experts = tl.arange(0, BLOCK_E)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        choice = tl.where((experts < NUM_EXPERTS)[None, :], scores, float("-inf"))
    else:
        scores = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        choice = logits
    if correction_bias is not None:
        correction = tl.load(correction_bias + experts, mask=experts < NUM_EXPERTS, other=0.0)
        choice += correction.to(tl.float32)[None, :]
    if NUM_GROUPS > 1:
        choice = _in_chosen_groups(choice, BLOCK_T, BLOCK_E, NUM_GROUPS, NUM_CHOSEN_GROUPS, NUM_EXPERTS // NUM_GROUPS)
    keys = _sort_keys(choice, experts[None, :], BLOCK_E)
    chosen = tl.zeros([BLOCK_T, BLOCK_E], tl.int32)
    for _ in range(TOP_K):
        is_best = keys == tl.max(keys, axis=1)[:, None]
        chosen = tl.where(is_best, 1, chosen)
        keys = tl.where(is_best, _CHOSEN, keys)
    if DIVIDES_BY_CHOSEN:
        total = _exact_sum(tl.where(chosen > 0, scores, 0.0))
        divisor = total + 1e-20 if IS_SIGMOID else total
        return chosen, scores / divisor[:, None] * scale
    if IS_SIGMOID:
        return chosen, scores * scale
    return chosen, scores / _exact_sum(scores)[:, None] * scale


@triton.jit
def _place(
    chosen, before, first_token, pairs, positions, num_tokens,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Store the sorted rows of the chosen pairs; `before` [BLOCK_E] is the next sorted row of each expert."""
    tokens = first_token + tl.arange(0, BLOCK_T)
    slots = tl.cumsum(chosen, axis=1) - chosen
    rows = before[None, :] + tl.cumsum(chosen, axis=0) - chosen
    numbers = tokens[:, None] * SLOTS + slots
    tl.store(pairs + rows, numbers, mask=chosen > 0)
    tl.store(positions + numbers, rows, mask=chosen > 0)
    if SLOTS > TOP_K:
        shared_rows, shared_numbers = num_tokens * TOP_K + tokens, tokens * SLOTS + TOP_K
        tl.store(pairs + shared_rows, shared_numbers, mask=tokens < num_tokens)
        tl.store(positions + shared_numbers, shared_rows, mask=tokens < num_tokens)


@triton.jit
def _list_blocks(
    counts, offsets, blocks, num_blocks, first_owned, end_owned, num_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, FIELDS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Store the blocks of the owned experts, in order."""
    experts = tl.arange(0, BLOCK_E)
    is_owned = (experts >= first_owned) & (experts < end_owned)
    of_expert = tl.where(is_owned, (counts + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    start = tl.cumsum(of_expert, axis=0) - of_expert
    most = (num_tokens + BLOCK_ROWS - 1) // BLOCK_ROWS
    num_chosen = tl.sum(of_expert, axis=0)
    tl.store(num_blocks, num_chosen + most * (SLOTS - TOP_K))
    for number in range(most):
        block = blocks + (start + number) * FIELDS
        used = number < of_expert
        tl.store(block, experts - first_owned, mask=used)
        tl.store(block + 1, offsets + number * BLOCK_ROWS, mask=used)
        tl.store(block + 2, offsets + counts, mask=used)
        if SLOTS > TOP_K:
            shared = blocks + (num_chosen + number) * FIELDS
            tl.store(shared, NUM_EXPERTS - first_owned)
            tl.store(shared + 1, num_tokens * TOP_K + number * BLOCK_ROWS)
            tl.store(shared + 2, num_tokens * SLOTS)


@triton.jit
def _store_offsets(
    offsets, values, num_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    experts = tl.arange(0, BLOCK_E)
    tl.store(offsets + experts, values, mask=experts < NUM_EXPERTS)
    tl.store(offsets + NUM_EXPERTS, num_tokens * TOP_K)
    if SLOTS > TOP_K:
        tl.store(offsets + NUM_EXPERTS + 1, num_tokens * SLOTS)


@triton.jit
def _store_chosen(
    chosen, values, gates, ids, weights, first_token, num_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, GATE_STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Store ids and weights. `gates`: chains of the logit of the shared expert, or None if its weight is 1."""
    tokens = first_token + tl.arange(0, BLOCK_T)
    numbers = tokens[:, None] * SLOTS + tl.cumsum(chosen, axis=1) - chosen
    experts = tl.zeros([BLOCK_T, BLOCK_E], tl.int32) + tl.arange(0, BLOCK_E)[None, :]
    tl.store(ids + numbers, experts, mask=chosen > 0)
    tl.store(weights + numbers, values, mask=chosen > 0)
    if SLOTS > TOP_K:
        weight = tl.full([BLOCK_T], 1.0, tl.float32)
        if gates is not None:
            logits = _sum_of_chains(gates + tokens * GATE_STRIDE, num_tokens * GATE_STRIDE, tokens < num_tokens)
            weight = 1.0 / (1.0 + tl.exp(-logits))
        tl.store(ids + tokens * SLOTS + TOP_K, tl.full([BLOCK_T], NUM_EXPERTS, tl.int32), mask=tokens < num_tokens)
        tl.store(weights + tokens * SLOTS + TOP_K, weight, mask=tokens < num_tokens)


@triton.jit
def _sum_of_chains(first, size, inside):
    """Return the sum of four chains that are `size` elements apart."""
    a, b = tl.load(first, mask=inside, other=0.0), tl.load(first + size, mask=inside, other=0.0)
    c, d = tl.load(first + 2 * size, mask=inside, other=0.0), tl.load(first + 3 * size, mask=inside, other=0.0)
    return (a + b) + (c + d)


@triton.jit
def _load_logits(
    chains, bias, first_token, num_tokens,
    NUM_EXPERTS: tl.constexpr, NUM_LOGITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Return the logits of the experts, sums of chains [4, num_tokens, NUM_LOGITS]."""
    tokens, experts = first_token + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    inside = (tokens < num_tokens)[:, None] & (experts < NUM_EXPERTS)[None, :]
    first = chains + tokens[:, None] * NUM_LOGITS + experts[None, :]
    return _with_bias(_sum_of_chains(first, num_tokens * NUM_LOGITS, inside), bias, NUM_EXPERTS, BLOCK_E)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_chains_kernel(
    x, weight, chains, num_tokens,
    HIDDEN: tl.constexpr, NUM_LOGITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run program (logits, tokens, chain): sum every fourth BLOCK_K inputs of its logits."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    chain = tl.program_id(2)
    total = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for first in range(0, HIDDEN, 4 * BLOCK_K):
        total = _product(
            x, weight, tokens, experts, first + chain * BLOCK_K, num_tokens, total,
            HIDDEN, NUM_LOGITS, BLOCK_K, WIDENS,
        )  # fmt: skip
    inside = (tokens < num_tokens)[:, None] & (experts < NUM_LOGITS)[None, :]
    target = chains + (chain * num_tokens + tokens[:, None]) * NUM_LOGITS + experts[None, :]
    tl.store(target, total, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "first_owned", "end_owned"])
def _route_few_kernel(
    chains, gates, bias, correction_bias, ids, weights, pairs, offsets, positions, blocks, num_blocks,
    num_tokens, first_owned, end_owned, scale,
    NUM_EXPERTS: tl.constexpr, NUM_LOGITS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    GATE_STRIDE: tl.constexpr, IS_SIGMOID: tl.constexpr, DIVIDES_BY_CHOSEN: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr, FIELDS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Choose the experts of all tokens and sort the pairs, in one program."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    tokens = tl.arange(0, BLOCK_T)
    values = _load_logits(chains, bias, 0, num_tokens, NUM_EXPERTS, NUM_LOGITS, BLOCK_T, BLOCK_E)
    chosen, values = _choose(
        values, correction_bias, scale,
        NUM_EXPERTS, TOP_K, IS_SIGMOID, DIVIDES_BY_CHOSEN, NUM_GROUPS, NUM_CHOSEN_GROUPS, BLOCK_T, BLOCK_E,
    )  # fmt: skip
    chosen = tl.where((tokens < num_tokens)[:, None], chosen, 0)
    counts = tl.sum(chosen, axis=0)
    before = tl.cumsum(counts, axis=0) - counts
    _store_chosen(
        chosen, values, gates, ids, weights, 0, num_tokens, NUM_EXPERTS, TOP_K, SLOTS, GATE_STRIDE, BLOCK_T, BLOCK_E
    )
    _place(chosen, before, 0, pairs, positions, num_tokens, TOP_K, SLOTS, BLOCK_T)
    _store_offsets(offsets, before, num_tokens, NUM_EXPERTS, TOP_K, SLOTS, BLOCK_E)
    _list_blocks(
        counts, before, blocks, num_blocks, first_owned, end_owned, num_tokens,
        NUM_EXPERTS, TOP_K, SLOTS, FIELDS, BLOCK_E, BLOCK_ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _route_many_kernel(
    x, weight, chains, gates, bias, correction_bias, ids, weights, counts, num_tokens, scale,
    HIDDEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_LOGITS: tl.constexpr, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr, GATE_STRIDE: tl.constexpr, IS_SIGMOID: tl.constexpr, DIVIDES_BY_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Choose the experts of BLOCK_T tokens and count them: counts [token blocks, E]. Logits may be in `chains`."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    first_token = tl.program_id(0) * BLOCK_T
    tokens, experts = first_token + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    if chains is not None:
        values = _load_logits(chains, bias, first_token, num_tokens, NUM_EXPERTS, NUM_LOGITS, BLOCK_T, BLOCK_E)
    else:
        values = _logits_of(
            x, weight, bias, first_token, num_tokens, HIDDEN, NUM_EXPERTS, BLOCK_T, BLOCK_E, BLOCK_K, WIDENS
        )
    chosen, values = _choose(
        values, correction_bias, scale,
        NUM_EXPERTS, TOP_K, IS_SIGMOID, DIVIDES_BY_CHOSEN, NUM_GROUPS, NUM_CHOSEN_GROUPS, BLOCK_T, BLOCK_E,
    )  # fmt: skip
    chosen = tl.where((tokens < num_tokens)[:, None], chosen, 0)
    _store_chosen(
        chosen, values, gates, ids, weights, first_token, num_tokens,
        NUM_EXPERTS, TOP_K, SLOTS, GATE_STRIDE, BLOCK_T, BLOCK_E,
    )  # fmt: skip
    of_block = counts + tl.program_id(0) * NUM_EXPERTS
    tl.store(of_block + experts, tl.sum(chosen, axis=0).to(counts.dtype.element_ty), mask=experts < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_tokens", "first_owned", "end_owned"])
def _sort_pairs_kernel(
    ids, counts, pairs, offsets, positions, blocks, num_blocks, num_tokens, first_owned, end_owned,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, FIELDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, COUNTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Place the pairs of BLOCK_T tokens after those of all earlier tokens; program 0 also stores the lists."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, BLOCK_E)
    total, earlier = tl.zeros([BLOCK_E], tl.int32), tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_programs, COUNTED):
        rows = first + tl.arange(0, COUNTED)
        inside = (rows < num_programs)[:, None] & (experts < NUM_EXPERTS)[None, :]
        of_rows = tl.load(counts + rows[:, None] * NUM_EXPERTS + experts[None, :], mask=inside, other=0).to(tl.int32)
        total += tl.sum(of_rows, axis=0)
        earlier += tl.sum(tl.where((rows < program)[:, None], of_rows, 0), axis=0)
    before = tl.cumsum(total, axis=0) - total
    tokens = program * BLOCK_T + tl.arange(0, BLOCK_T)
    chosen = tl.zeros([BLOCK_T, BLOCK_E], tl.int32)
    for slot in range(TOP_K):
        of_slot = tl.load(ids + tokens * SLOTS + slot, mask=tokens < num_tokens, other=-1)
        chosen += (of_slot[:, None] == experts[None, :]).to(tl.int32)
    _place(chosen, before + earlier, program * BLOCK_T, pairs, positions, num_tokens, TOP_K, SLOTS, BLOCK_T)
    if program == 0:
        _store_offsets(offsets, before, num_tokens, NUM_EXPERTS, TOP_K, SLOTS, BLOCK_E)
        _list_blocks(
            total, before, blocks, num_blocks, first_owned, end_owned, num_tokens,
            NUM_EXPERTS, TOP_K, SLOTS, FIELDS, BLOCK_E, BLOCK_ROWS,
        )  # fmt: skip


def route(
    x: Tensor,
    weight: Tensor,
    router: Router,
    bias: Tensor | None = None,
    correction_bias: Tensor | None = None,
    owned: range | None = None,
) -> Routing:
    """Choose the experts of each token.

    Args:
        x: [T, H], contiguous, bfloat16, float16 or float32.
        weight: [E, H], contiguous; products and sums are float32. A last row is the gate of a gated shared expert.
        router: The rule of choice.
        bias: [E], added to the logits.
        correction_bias: [E], added to the scores for the choice only.
        owned: Experts that this rank computes; None: all, also a shared one.

    Returns:
        The routing.
    """
    if x.is_cuda:
        return route_triton(x, weight, router, bias, correction_bias, owned)
    return route_reference(x, weight, router, bias, correction_bias, owned)


def route_triton(
    x: Tensor,
    weight: Tensor,
    router: Router,
    bias: Tensor | None = None,
    correction_bias: Tensor | None = None,
    owned: range | None = None,
) -> Routing:
    num_tokens = len(x)
    assert weight.shape == (router.num_logits, x.shape[1]) and x.is_contiguous() and weight.is_contiguous()
    routing = empty_routing(x, router, owned)
    if num_tokens == 0:
        routing.num_blocks.zero_()
        return routing
    of_product, of_choice, common = _constants(x, weight, router)
    block_e = of_choice["BLOCK_E"]
    chains = _chains(x, weight, of_product) if num_tokens <= _MAX_QUARTERED else None
    gates = None
    if router.shared == "gated":
        gates = (_chains(x, weight[-1:], of_product) if chains is None else chains)[..., -1]
    of_choice["GATE_STRIDE"] = 1 if gates is None else gates.stride(1)
    chosen = routing.ids, routing.weights
    lists = routing.pairs, routing.offsets, routing.positions, routing.blocks, routing.num_blocks
    bounds = num_tokens, routing.owned.start, routing.owned.stop
    sorting = {"FIELDS": BLOCK_FIELDS, "BLOCK_ROWS": routing.block_rows, **common}
    if num_tokens <= _MAX_SORTED_AT_ONCE:
        block_t = triton.next_power_of_2(num_tokens)
        _route_few_kernel[(1,)](
            chains, gates, bias, correction_bias, *chosen, *lists, *bounds, router.scale,
            **of_choice, **sorting, BLOCK_T=block_t, num_warps=_choosing_warps(block_t * block_e),
        )  # fmt: skip
        return routing
    block_t = _BLOCK_T if chains is None else _CHOSEN_AT_ONCE
    num_blocks = triton.cdiv(num_tokens, block_t)
    counts = x.new_empty(num_blocks, router.num_experts, dtype=torch.int8)  # at most 16
    _route_many_kernel[(num_blocks,)](
        x, weight, chains, gates, bias, correction_bias, *chosen, counts, num_tokens, router.scale,
        **of_product, **of_choice, **common, BLOCK_T=block_t, num_warps=_choosing_warps(block_t * block_e),
        num_stages=3 if block_e <= 128 else 2,
    )  # fmt: skip
    _sort_pairs_kernel[(num_blocks,)](
        routing.ids, counts, *lists, *bounds, **sorting, BLOCK_E=block_e, BLOCK_T=block_t, COUNTED=64,
        num_warps=4 if block_t * block_e <= 2048 else 8,  # with 4, more would spill registers
    )  # fmt: skip
    return routing


def _constants(x: Tensor, weight: Tensor, router: Router) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return what the kernels are compiled for: of the product, of the choice, and of all."""
    block_e = max(16, triton.next_power_of_2(router.num_experts))
    # From E only, because it decides the order of the sums. A stage of _route_many_kernel has 64 KiB of the weight.
    block_k = max(16, min(64, 16_384 // (block_e * max(x.element_size(), weight.element_size()))))
    of_product = {"HIDDEN": x.shape[1], "WIDENS": x.dtype != weight.dtype, "BLOCK_K": block_k}
    of_choice = {
        "NUM_LOGITS": router.num_logits,
        "IS_SIGMOID": router.scoring == "sigmoid",
        "DIVIDES_BY_CHOSEN": router.divides_by_chosen,
        "NUM_GROUPS": router.num_groups,
        "NUM_CHOSEN_GROUPS": router.num_chosen_groups,
        "BLOCK_E": block_e,
    }
    slots = router.top_k + router.num_shared
    common = {"NUM_EXPERTS": router.num_experts, "TOP_K": router.top_k, "SLOTS": slots, **dependent_launch(x)}
    return of_product, of_choice, common


def _chains(x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the four chains of each logit [4, T, rows of the weight]."""
    num_tokens, num_logits = len(x), len(weight)
    chains = x.new_empty(4, num_tokens, num_logits, dtype=torch.float32)
    few = 16 if x.element_size() == 4 else 8
    _route_chains_kernel[(triton.cdiv(num_logits, few), triton.cdiv(num_tokens, _BLOCK_T), 4)](
        x, weight, chains, num_tokens, **options, NUM_LOGITS=num_logits, BLOCK_T=_BLOCK_T, BLOCK_E=few,
        **dependent_launch(x), num_warps=1, num_stages=4,
    )  # fmt: skip
    return chains


def _choosing_warps(num_scores: int) -> int:
    """Return the warps that choose fastest among so many scores: up to 4 per thread, measured on an H200."""
    return min(8, 1 << (max(num_scores // 128, 1) - 1).bit_length())
