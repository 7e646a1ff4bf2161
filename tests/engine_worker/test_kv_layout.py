"""The size of a KV block in bytes, by shape, dtype, and group."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.layout import KVGroup, KVLayout, kv_cache_dtype
from engine_worker.model.spec import ModelShape, kv_layout
from tests.builders import make_sequence


def group(**changes: Any) -> KVGroup:
    shape: dict[str, Any] = {"layers": range(32), "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    return KVGroup(**{**shape, **changes})


def test_layout_llama_8b_block_is_2_mib() -> None:
    layout = KVLayout(groups=(group(),), block_size=16)
    assert (layout.block_bytes, layout.token_bytes) == (2 * 2**20, 128 * 2**10)
    assert layout.pool_shape(100) == (100, 32, 2, 8, 16, 128)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_layout_blocks_of_tokens_rounds_up(num_tokens: int, num_blocks: int) -> None:
    assert KVLayout(groups=(group(),), block_size=16).blocks_of(num_tokens) == num_blocks


def test_layout_kv_dtype_sets_block_bytes() -> None:
    in_float32 = KVLayout(groups=(group(dtype="float32"),), block_size=16)
    assert in_float32.block_bytes == 2 * KVLayout(groups=(group(),), block_size=16).block_bytes
    assert KVLayout(groups=(group(dtype="float8_e4m3fn"),), block_size=16).token_bytes == 64 * 2**10


@pytest.mark.parametrize(
    ("wanted", "dtype"),
    [
        ("auto", "float16"),
        ("bf16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("fp8", "float8_e4m3fn"),
        ("fp32", "float32"),
        ("float32", "float32"),
    ],
)
def test_kv_cache_dtype_accepts_aliases(wanted: str, dtype: str) -> None:
    assert kv_cache_dtype(wanted, "float16") == dtype
    assert kv_cache_dtype("fp8_e4m3", "float16") == kv_cache_dtype("fp8", "float16")


def test_layout_groups_must_have_equal_block_shapes() -> None:
    pair = KVLayout(groups=(group(layers=range(0, 32, 2)), group(layers=range(1, 32, 2))), block_size=16)
    assert (pair.block_bytes, pair.token_bytes) == (2**20, 128 * 2**10)
    assert pair.places[:3] == ((0, 0), (1, 0), (0, 1))
    with pytest.raises(AssertionError, match="must have one shape"):
        KVLayout(groups=(group(), group(layers=range(16))), block_size=16)


@dataclass(frozen=True)
class Shape:
    """The attributes of a ModelShape that a layout depends on; `windows` has one window per layer."""

    windows: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    state_shape: tuple[int, int] = (0, 0)

    @property
    def cache_layers(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(window=window) for window in self.windows]


def layout_of(shape: Shape, **options: int) -> KVLayout:
    return kv_layout(cast("ModelShape", shape), 16, "bfloat16", **options)


GPT_OSS_20B = Shape((128, 0) * 12, 8, 64)
GEMMA_3_1B = Shape(tuple(512 if (layer + 1) % 6 else 0 for layer in range(26)), 1, 256)
GEMMA_3_27B = Shape(tuple(1024 if (layer + 1) % 6 else 0 for layer in range(62)), 16, 128)


@pytest.mark.parametrize(
    ("shape", "num_groups", "num_places"), [(GPT_OSS_20B, 2, 12), (GEMMA_3_1B, 7, 4), (GEMMA_3_27B, 7, 10)]
)
def test_layout_divides_layers_into_equal_groups(shape: Shape, num_groups: int, num_places: int) -> None:
    layout = layout_of(shape)
    assert (len(layout.groups), layout.pool_shape(3)[:2]) == (num_groups, (3, num_places))
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(shape.windows)))
    assert {group.window for group in layout.groups} == set(shape.windows)
    for layer, (number, place) in enumerate(layout.places):
        assert layout.groups[number].layers[place] == layer
        assert layout.groups[number].window == shape.windows[layer]
    (merged,) = layout_of(shape, max_groups=1).groups
    assert (merged.window, len(merged.layers)) == (0, len(shape.windows))


def decoding_bytes(layout: KVLayout, num_tokens: int) -> int:
    """Return the bytes that a decoding sequence of this length keeps in a KV cache, counted in its tables."""
    kv_cache = KVCacheManager(1 + layout.blocks_of(num_tokens), 16, windows=[group.window for group in layout.groups])
    sequence = make_sequence(num_tokens)
    assert kv_cache.try_admit(sequence)
    while sequence.num_uncomputed_tokens:
        kv_cache.allocate(sequence)
        kv_cache.publish(sequence, sequence.kv.num_computed_tokens + 1)
        sequence.kv.num_computed_tokens += 1
        kv_cache.take_transfers()
        kv_cache.release_outside_window()
    kv_cache.check_integrity([sequence])
    return len(sequence.kv.blocks) * layout.block_bytes


@pytest.mark.parametrize("num_tokens", [2_000, 8_000])
def test_gpt_oss_sequence_keeps_window_and_full_half(num_tokens: int) -> None:
    """Limit: 24.6 KB per token plus 3.6 MB; one group keeps 49.2 KB per token."""
    assert layout_of(GPT_OSS_20B).token_bytes == 49_152
    assert decoding_bytes(layout_of(GPT_OSS_20B), num_tokens) <= 24_600 * num_tokens + 3_600_000


def test_gemma_3_27b_sequence_keeps_a_quarter_of_one_group() -> None:
    layouts = layout_of(GEMMA_3_27B), layout_of(GEMMA_3_27B, max_groups=1)
    divided, merged = (layout.max_blocks(32_768, 1) * layout.block_bytes for layout in layouts)
    assert divided <= merged / 4
