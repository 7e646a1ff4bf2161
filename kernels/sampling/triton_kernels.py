"""Triton kernels of sampling, with the contract of sample_tokens.py and the random numbers of reference.py.

group_kernel reads the scores once and computes each group's largest score and mass; floor_kernel finds the smallest
kept score without a sort; draw_kernel draws a group, then a token. Masses are sums of exp((score - group maximum) /
temperature), so one pass suffices. Tiles do not depend on the batch, so a row's bits do not depend on its position.
Rows with non-finite scores end with a non-finite `best` and an arbitrary token.
"""
# x != x tests for NaN.
# ruff: noqa: PLR0124

import triton
import triton.language as tl

from kernels.sampling.counter_based_noise import GOLDEN, MULTIPLIERS
from kernels.sampling.reference import GROUP_SIZE

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST_MULTIPLIER = tl.constexpr(MULTIPLIERS[0])
_SECOND_MULTIPLIER = tl.constexpr(MULTIPLIERS[1])
_GROUP = tl.constexpr(GROUP_SIZE)
_INFINITY = tl.constexpr(float("inf"))

# Views of one tensor that start at multiples of 8 bytes. Specializing on 16-byte alignment would compile another
# variant when the first odd number of rows is sampled. A program reads one number of each.
_PARAMETERS = ["seeds", "indices", "temperature", "log_min_p", "top_k", "top_p", "truncated_rows"]


@triton.jit
def _mix(values):
    values = (values ^ (values >> 30)) * _FIRST_MULTIPLIER
    values = (values ^ (values >> 27)) * _SECOND_MULTIPLIER
    return values ^ (values >> 31)


@triton.jit
def _gumbel(seed, index, STAGE: tl.constexpr, counters):
    """Mirror counter_based_noise.gumbel_noise: the same integers, then float64."""
    # Broadcast to the counters first: a scalar has no shape to be a constant of.
    zeros = (counters * 0).to(tl.uint64)
    key = _mix(_mix(zeros + seed.to(tl.uint64) + _GOLDEN) + (index + 1).to(tl.uint64) * _GOLDEN)
    bits = _mix(_mix(key ^ STAGE) + counters.to(tl.uint64) * _GOLDEN) >> 12
    uniform = (bits.to(tl.float64) + 0.5) * (2.0**-52)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _greatest(values):
    """Return the row's maximum, or NaN if any part is NaN, which tl.max ignores."""
    unordered = tl.max((values != values).to(tl.int32), axis=0)
    greatest = tl.max(values, axis=0)
    return tl.where(unordered > 0, float("nan"), greatest)


@triton.jit
def argmax_kernel(scores, token_ids, best_scores, row_stride, VOCAB: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    greatest = tl.full([TILE], -_INFINITY, tl.float32)
    found = tl.zeros([TILE], tl.int32)
    unordered = tl.zeros([TILE], tl.int32)
    for start in range(0, VOCAB, TILE):
        inside = start + columns < VOCAB
        values = tl.load(scores + row * row_stride + start + columns, mask=inside, other=-_INFINITY).to(tl.float32)
        unordered |= (values != values).to(tl.int32)
        better = values > greatest  # of equal scores the first stays
        found = tl.where(better, start + columns, found)
        greatest = tl.where(better, values, greatest)
    best = tl.max(greatest, axis=0)
    token_id = tl.min(tl.where(greatest == best, found, VOCAB), axis=0)
    tl.store(token_ids + row, tl.minimum(token_id, VOCAB - 1).to(tl.int64))
    tl.store(best_scores + row, tl.where(tl.max(unordered, axis=0) > 0, float("nan"), best))


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def group_kernel(
    scores, temperature, group_best, group_mass, floors, row_stride,
    VOCAB: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS_PER_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS_PER_TILE + tl.arange(0, GROUPS_PER_TILE)
    values = _load_groups(scores + row * row_stride, groups, groups < NUM_GROUPS, VOCAB)
    unordered = tl.max((values != values).to(tl.int32), axis=1)
    best = tl.max(values, axis=1)
    here = row * NUM_GROUPS + groups
    tl.store(group_best + here, tl.where(unordered > 0, float("nan"), best), mask=groups < NUM_GROUPS)
    row_temperature = tl.load(temperature + row).to(tl.float32)
    if row_temperature > 0.0:
        mass = _mass_of_groups(values, best, 1.0 / row_temperature)
        tl.store(group_mass + here, mass, mask=groups < NUM_GROUPS)
    if tl.program_id(1) == 0:
        tl.store(floors + row, -_INFINITY)


@triton.jit
def _load_groups(scores_of_row, groups, is_group, VOCAB: tl.constexpr):
    columns = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = is_group[:, None] & (columns < VOCAB)
    return tl.load(scores_of_row + columns, mask=inside, other=-_INFINITY).to(tl.float32)


@triton.jit
def _mass_of_groups(values, best, inverse_temperature):
    """Sum the masses of groups; a group of only -inf has mass 0, not NaN."""
    base = tl.where(best == -_INFINITY, 0.0, best)
    return tl.sum(tl.exp((values - base[:, None]) * inverse_temperature), axis=1)


@triton.jit
def _list_groups(active, best, floor, NUM_GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr):
    """Write the list of groups that hold a score of at least `floor`, and return their number."""
    groups = tl.arange(0, GROUPS_BLOCK)
    is_active = ((groups < NUM_GROUPS) & (best >= floor)).to(tl.int32)
    places = tl.cumsum(is_active, axis=0) - 1
    tl.debug_barrier()  # wait for readers of the previous list
    tl.store(active + places, groups, mask=is_active > 0)
    tl.debug_barrier()
    return tl.sum(is_active, axis=0)


@triton.jit
def _load_listed(scores_of_row, active, start, num_active, VOCAB: tl.constexpr, GROUPS_PER_TILE: tl.constexpr):
    places = start + tl.arange(0, GROUPS_PER_TILE)
    groups = tl.load(active + places, mask=places < num_active, other=0)
    return _load_groups(scores_of_row, groups, places < num_active, VOCAB)


@triton.jit
def _measure(
    scores_of_row, active, best, greatest, inverse_temperature, floor,
    VOCAB: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, GROUPS_PER_TILE: tl.constexpr,
):  # fmt: skip
    """Return the number of finite scores from `floor` on, their mass, and the smallest of them."""
    num_active = _list_groups(active, best, floor, NUM_GROUPS, GROUPS_BLOCK)
    number = tl.zeros([GROUPS_PER_TILE, _GROUP], tl.float32)
    mass = tl.zeros([GROUPS_PER_TILE, _GROUP], tl.float32)
    least = tl.full([GROUPS_PER_TILE, _GROUP], _INFINITY, tl.float32)
    following = _load_listed(scores_of_row, active, 0, num_active, VOCAB, GROUPS_PER_TILE)
    for start in range(0, num_active, GROUPS_PER_TILE):
        values = following
        following = _load_listed(scores_of_row, active, start + GROUPS_PER_TILE, num_active, VOCAB, GROUPS_PER_TILE)
        inside = (values >= floor) & (values > -_INFINITY)
        number += tl.where(inside, 1.0, 0.0)
        mass += tl.where(inside, tl.exp((values - greatest) * inverse_temperature), 0.0)
        least = tl.minimum(least, tl.where(inside, values, _INFINITY))
    return tl.sum(number), tl.sum(mass), tl.min(least)


@triton.jit
def _search(
    scores_of_row, active, best, greatest, inverse_temperature, low, target,
    BY_MASS: tl.constexpr, VOCAB: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr,
    GROUPS_PER_TILE: tl.constexpr,
):  # fmt: skip
    """Return the largest score s such that all scores from s on count at least `target`; those from `low` on do.

    A score counts 1, or with BY_MASS exp((score - greatest) / temperature). Each pass over the groups that reach `low`
    quarters [low, high): the scores from low on reach the target, those from high on do not. A pass also finds the
    smallest score from `low` on and the largest below `high`; when they are equal, that score is the exact answer.
    """
    high = greatest * 0.0 + _INFINITY
    top = greatest  # an upper bound of the scores below `high`
    is_open = low < greatest
    # 16 passes quarter the 2^32 floats down to one; scores clustered far from both ends take a few more.
    num_passes = 0
    while is_open & (num_passes < 256):
        num_active = _list_groups(active, best, low, NUM_GROUPS, GROUPS_BLOCK)
        quarter = top * 0.25 - low * 0.25  # top - low can overflow
        first, second, third = low + quarter, low + 2.0 * quarter, top - quarter
        above_first = tl.zeros([GROUPS_PER_TILE, _GROUP], tl.float32)
        above_second = tl.zeros([GROUPS_PER_TILE, _GROUP], tl.float32)
        above_third = tl.zeros([GROUPS_PER_TILE, _GROUP], tl.float32)
        least = tl.full([GROUPS_PER_TILE, _GROUP], _INFINITY, tl.float32)
        largest = tl.full([GROUPS_PER_TILE, _GROUP], -_INFINITY, tl.float32)
        # Prefetch one tile: a program is alone on its SM, so nothing else hides the latency of a load.
        following = _load_listed(scores_of_row, active, 0, num_active, VOCAB, GROUPS_PER_TILE)
        for start in range(0, num_active, GROUPS_PER_TILE):
            values = following
            following = _load_listed(
                scores_of_row, active, start + GROUPS_PER_TILE, num_active, VOCAB, GROUPS_PER_TILE
            )  # fmt: skip
            counted = tl.full([GROUPS_PER_TILE, _GROUP], 1.0, tl.float32)
            if BY_MASS:
                counted = tl.exp((values - greatest) * inverse_temperature)
            above_first += tl.where(values >= first, counted, 0.0)
            above_second += tl.where(values >= second, counted, 0.0)
            above_third += tl.where(values >= third, counted, 0.0)
            least = tl.minimum(least, tl.where(values >= low, values, _INFINITY))
            largest = tl.maximum(largest, tl.where(values < high, values, -_INFINITY))
        from_first, from_second, from_third = tl.sum(above_first), tl.sum(above_second), tl.sum(above_third)
        bottom = tl.min(least)
        top = tl.max(largest)
        is_open = bottom < top
        if from_third >= target:
            low = third
        elif from_second >= target:
            low = second
            high = third
        elif from_first >= target:
            low = first
            high = second
        else:
            high = first
        # If one score is left, it is the answer. Otherwise the smallest one is the new lower bound.
        low = tl.where(is_open, tl.maximum(low, bottom), bottom)
        top = tl.minimum(top, high)
        num_passes += 1
    return low


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def floor_kernel(
    scores, truncated_rows, temperature, log_min_p, top_k, top_p, group_best, group_mass, active_lists, floors,
    row_stride,
    VOCAB: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, GROUPS_PER_TILE: tl.constexpr,
):  # fmt: skip
    """Write the smallest kept score, and the masses of the groups without dropped scores."""
    row = tl.load(truncated_rows + tl.program_id(0))
    active = active_lists + tl.program_id(0).to(tl.int64) * NUM_GROUPS
    scores_of_row = scores + row * row_stride
    groups = tl.arange(0, GROUPS_BLOCK)
    is_group = groups < NUM_GROUPS
    best = tl.load(group_best + row * NUM_GROUPS + groups, mask=is_group, other=-_INFINITY)
    greatest = _greatest(best)
    if (greatest > -_INFINITY) & (greatest < _INFINITY):  # otherwise the row fails
        row_temperature = tl.load(temperature + row).to(tl.float32)
        inverse_temperature = 1.0 / row_temperature
        floor = greatest + row_temperature * tl.load(log_min_p + row).to(tl.float32)
        number_kept = tl.load(top_k + row)
        if (number_kept > 0) & (number_kept < VOCAB):
            low = tl.min(tl.where(is_group, best, _INFINITY))
            number = tl.full([], VOCAB, tl.float32)
            if (number_kept > NUM_GROUPS) | (low == -_INFINITY):
                number, _, low = _measure(
                    scores_of_row, active, best, greatest, inverse_temperature, -_INFINITY,
                    VOCAB, NUM_GROUPS, GROUPS_BLOCK, GROUPS_PER_TILE,
                )  # fmt: skip
            if number > number_kept.to(tl.float32):
                kth = _search(
                    scores_of_row, active, best, greatest, inverse_temperature, low,
                    number_kept.to(tl.float32), False,
                    VOCAB, NUM_GROUPS, GROUPS_BLOCK, GROUPS_PER_TILE,
                )  # fmt: skip
                floor = tl.maximum(floor, kth)
        ratio = tl.load(top_p + row)
        if ratio < 1.0:
            masses = tl.load(group_mass + row * NUM_GROUPS + groups, mask=is_group, other=0.0)
            mass = tl.sum(masses * tl.exp((best - greatest) * inverse_temperature))
            if floor > -_INFINITY:
                _, mass, _ = _measure(
                    scores_of_row, active, best, greatest, inverse_temperature, floor,
                    VOCAB, NUM_GROUPS, GROUPS_BLOCK, GROUPS_PER_TILE,
                )  # fmt: skip
            # All scores below `bound` together weigh at most half of what may be dropped.
            spare = ((1.0 - ratio) * 0.5).to(tl.float32) * mass / VOCAB
            bound = tl.maximum(greatest + row_temperature * tl.log(tl.maximum(spare, 1e-37)), -3e38)
            floor = _search(
                scores_of_row, active, best, greatest, inverse_temperature, tl.maximum(floor, bound),
                ratio.to(tl.float32) * mass, True,
                VOCAB, NUM_GROUPS, GROUPS_BLOCK, GROUPS_PER_TILE,
            )  # fmt: skip
        tl.store(floors + row, floor)
        tl.store(group_mass + row * NUM_GROUPS + groups, 0.0, mask=is_group & (best < floor))
        num_active = _list_groups(active, best, floor, NUM_GROUPS, GROUPS_BLOCK)
        for start in range(0, num_active, GROUPS_PER_TILE):
            places = start + tl.arange(0, GROUPS_PER_TILE)
            listed = tl.load(active + places, mask=places < num_active, other=0)
            values = _load_groups(scores_of_row, listed, places < num_active, VOCAB)
            mass_kept = _mass_of_groups(tl.where(values >= floor, values, -_INFINITY), tl.max(values, axis=1),
                                        inverse_temperature)  # fmt: skip
            tl.store(group_mass + row * NUM_GROUPS + listed, mass_kept, mask=places < num_active)


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def draw_kernel(
    scores, seeds, indices, temperature, group_best, group_mass, floors, token_ids, best_scores, row_stride,
    VOCAB: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS_BLOCK)
    is_group = groups < NUM_GROUPS
    best = tl.load(group_best + row * NUM_GROUPS + groups, mask=is_group, other=-_INFINITY)
    greatest = _greatest(best)
    row_temperature = tl.load(temperature + row)
    seed, index = tl.load(seeds + row), tl.load(indices + row)
    is_random = row_temperature > 0.0
    # Greedy rows are drawn at temperature 1 from the group of the best score, then its position is taken below.
    divisor = tl.where(is_random, row_temperature, 1.0)

    masses = tl.load(group_mass + row * NUM_GROUPS + groups, mask=is_group, other=0.0)
    log_mass = (best - greatest).to(tl.float64) / divisor + tl.log(masses.to(tl.float64))
    drawn_score = log_mass + _gumbel(seed, index, 0, groups)
    drawn_score = tl.where(is_group, drawn_score, -_INFINITY)
    wins = tl.where(is_random, drawn_score == tl.max(drawn_score, axis=0), best == greatest)
    group = tl.min(tl.where(wins & is_group, groups, NUM_GROUPS - 1), axis=0)

    columns = group * _GROUP + tl.arange(0, _GROUP)
    values = tl.load(scores + row * row_stride + columns, mask=columns < VOCAB, other=-_INFINITY).to(tl.float32)
    log_weights = (values - tl.max(values, axis=0)).to(tl.float64) / divisor
    log_weights = tl.where(values >= tl.load(floors + row), log_weights, -_INFINITY)
    score = log_weights + _gumbel(seed, index, 1, columns)
    score = tl.where(values > -_INFINITY, score, -_INFINITY)
    wins = tl.where(is_random, score == tl.max(score, axis=0), values == greatest)
    # A failing row may have no winner; its token must still be in the vocabulary.
    token_id = tl.min(tl.where(wins, columns, VOCAB - 1), axis=0)
    tl.store(token_ids + row, tl.minimum(token_id, VOCAB - 1).to(tl.int64))
    tl.store(best_scores + row, greatest)
