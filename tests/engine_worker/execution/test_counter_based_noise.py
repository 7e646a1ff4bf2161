import math

import pytest
import torch

from engine_worker.execution.counter_based_noise import _GOLDEN, _mix, _mix_tensor, _signed, draw_key, gumbel_noise

# The first outputs of SplitMix64 seeded with 0 (Steele, Lea, Flood 2014; the generator's published test vector).
SPLITMIX64_OF_0 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)


def test_hash_is_splitmix64_on_both_paths() -> None:
    states = [(_GOLDEN * step) % 2**64 for step in (1, 2, 3)]
    assert tuple(_mix(state) for state in states) == SPLITMIX64_OF_0
    on_tensor = _mix_tensor(torch.tensor([_signed(state) for state in states]))
    assert [value % 2**64 for value in on_tensor.tolist()] == list(SPLITMIX64_OF_0)


def test_keys_differ_by_seed_and_by_index() -> None:
    keys = {draw_key(seed, index) for seed in (-1, 0, 1, 2**63, 2**64 - 2) for index in range(200)}
    assert len(keys) == 5 * 200


def test_a_seed_is_taken_modulo_2_to_the_64() -> None:
    assert draw_key(-1, 3) == draw_key(2**64 - 1, 3)


def test_noise_of_a_counter_is_the_same_wherever_it_stands() -> None:
    key = draw_key(7, 0)
    alone = gumbel_noise([key], 1, torch.tensor([[42]]))
    among = gumbel_noise([draw_key(8, 0), key], 1, torch.tensor([[1, 2, 3], [41, 42, 43]]))
    assert among[1, 1] == alone[0, 0]
    assert gumbel_noise([key], 0, torch.tensor([[42]])) != alone


def test_noise_is_standard_gumbel() -> None:
    keys = [draw_key(seed, 0) for seed in range(64)]
    noise = gumbel_noise(keys, 0, torch.arange(4096).expand(64, -1)).flatten()
    standard_error = math.pi / math.sqrt(6 * noise.numel())
    assert abs(noise.mean().item() - 0.5772156649) < 4 * standard_error
    # Kolmogorov-Smirnov: the largest gap between the empirical and the exact distribution; 1.95 is the 0.1 % point.
    exact = torch.exp(-torch.exp(-noise.sort().values))
    empirical = torch.arange(1, noise.numel() + 1, dtype=torch.float64) / noise.numel()
    assert (exact - empirical).abs().max().item() * math.sqrt(noise.numel()) < 1.95


def test_extreme_hashes_give_finite_noise() -> None:
    # Counter = -key / golden makes the hash's input 0, whose output is 0: the least uniform there is.
    key = 0
    stage_key = _mix(key)
    inverse = pow(_GOLDEN, -1, 2**64)
    counter = _signed(-stage_key * inverse % 2**64)
    least = gumbel_noise([key], 0, torch.tensor([[counter]]))
    assert least.item() == pytest.approx(-math.log(53 * math.log(2)), rel=1e-14)
