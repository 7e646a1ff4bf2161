"""Counter-based Gumbel noise of the sampler."""

import math

import pytest
import torch

from kernels.sampling.counter_based_noise import GOLDEN, _mix, draw_keys, gumbel_noise, signed

# The first outputs of SplitMix64 seeded with 0 (Steele, Lea, Flood 2014; the generator's published test vector).
SPLITMIX64_OF_0 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)


def draw_key(seed: int, index: int) -> int:
    return int(draw_keys(torch.tensor([signed(seed % 2**64)]), torch.tensor([index])).item()) % 2**64


def test_hash_is_splitmix64() -> None:
    states = torch.tensor([signed(GOLDEN * step % 2**64) for step in (1, 2, 3)])
    assert [value % 2**64 for value in _mix(states).tolist()] == list(SPLITMIX64_OF_0)


def test_keys_differ_by_seed_and_index() -> None:
    keys = {draw_key(seed, index) for seed in (-1, 0, 1, 2**63, 2**64 - 2) for index in range(200)}
    assert len(keys) == 5 * 200


def test_noise_depends_only_on_its_counter() -> None:
    keys = draw_keys(torch.tensor([8, 7]), torch.tensor([0, 0]))
    alone = gumbel_noise(keys[1:], 1, torch.tensor([[42]]))
    among = gumbel_noise(keys, 1, torch.tensor([[1, 2, 3], [41, 42, 43]]))
    assert among[1, 1] == alone[0, 0]
    assert gumbel_noise(keys[1:], 0, torch.tensor([[42]])) != alone


def test_noise_is_standard_gumbel() -> None:
    keys = draw_keys(torch.arange(64), torch.zeros(64, dtype=torch.int64))
    noise = gumbel_noise(keys, 0, torch.arange(4096).expand(64, -1)).flatten()
    standard_error = math.pi / math.sqrt(6 * noise.numel())
    assert abs(noise.mean().item() - 0.5772156649) < 4 * standard_error
    # Kolmogorov-Smirnov: the largest gap between the empirical and the exact distribution; 1.95 is the 0.1 % point.
    exact = torch.exp(-torch.exp(-noise.sort().values))
    empirical = torch.arange(1, noise.numel() + 1, dtype=torch.float64) / noise.numel()
    assert (exact - empirical).abs().max().item() * math.sqrt(noise.numel()) < 1.95


def test_extreme_hashes_give_finite_noise() -> None:
    # Counter = -key / golden makes the hash's input 0, whose output is 0: the smallest possible uniform.
    stage_key = int(_mix(torch.zeros(1, dtype=torch.int64)).item()) % 2**64
    counter = signed(-stage_key * pow(GOLDEN, -1, 2**64) % 2**64)
    least = gumbel_noise(torch.zeros(1, dtype=torch.int64), 0, torch.tensor([[counter]]))
    assert least.item() == pytest.approx(-math.log(53 * math.log(2)), rel=1e-14)
