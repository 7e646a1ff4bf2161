"""The MXFP4 scheme: tensors, parts, granule, and what quantization_config and --quantization accept."""

import pytest

from engine_worker.model.quantization_config import weight_format
from engine_worker.model.specs.part import Part
from engine_worker.model.weight_format import BYTES, DENSE, Mxfp4Scheme, TensorForm, chosen_format

PUBLISHED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
    ],
}  # fmt: skip


def test_published_config_has_mxfp4_experts_only() -> None:
    found = weight_format({"quantization_config": PUBLISHED})
    assert found.scheme_of("model.layers.3.mlp.experts.gate_up_proj") == Mxfp4Scheme()
    for module in ("model.layers.3.self_attn.q_proj", "model.layers.3.mlp.router", "lm_head"):
        assert found.scheme_of(module) is None


def test_unknown_key_of_the_config_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mxfp4.*block_size"):
        weight_format({"quantization_config": {**PUBLISHED, "block_size": 16}})


def test_scheme_names_blocks_and_scales() -> None:
    forms = Mxfp4Scheme().tensors((4, 192, 96))
    assert forms == {"_blocks": TensorForm((4, 192, 3, 16), BYTES), "_scales": TensorForm((4, 192, 3), BYTES)}
    assert Mxfp4Scheme().num_bytes((4, 192, 96)) == 4 * 192 * 3 * 17


def test_parts_of_columns_are_counted_in_groups() -> None:
    rows, columns = Part(1, ((64, 128),)), Part(2, ((64, 96),))
    assert set(Mxfp4Scheme().parts(rows).values()) == {rows}
    assert set(Mxfp4Scheme().parts(columns).values()) == {Part(2, ((2, 3),))}


def test_quantization_mxfp4_requires_the_format() -> None:
    stored = weight_format({"quantization_config": PUBLISHED})
    assert chosen_format(stored, "mxfp4") == stored
    with pytest.raises(ValueError, match="--quantization mxfp4"):
        chosen_format(DENSE, "mxfp4")
