"""Multimodal checkpoints: their language model is served, under every published naming of its tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from engine_worker.model.architectures import spec_from_json
from engine_worker.model.preflight import check_files
from shared.model_files import read_model_files, text_part
from tests.builders import make_request
from tests.engine_worker.execution.reference import TINY, generate, make_runner

FP32_MARGIN = 1e-3  # two summation orders differ by about 1e-5 here
VISION = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 32, "patch_size": 16, "head_dim": 16,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
}  # fmt: skip
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3 of mistral": ("mistral3", {"model_type": "mistral", "sliding_window": None}),
    "mistral3 of ministral3": (
        "mistral3",
        {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "llava of qwen2": ("llava", {"model_type": "qwen2"}),
    "gemma3 of gemma3_text": ("gemma3", {"model_type": "gemma3_text", "sliding_window": 9}),
}
VISIONS = {"gemma3": SIGLIP}
# Names of published checkpoints; transformers 5 writes some of them so, and some as its classes are named.
NAMES: dict[str, dict[str, str]] = {
    "inside": {"model.language_model.": "model.language_model.", "lm_head.": "lm_head."},
    "outside": {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
                "model.vision_tower.": "vision_tower.", "model.multi_modal_projector.": "multi_modal_projector."},
}  # fmt: skip


def renamed(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("which", TEXTS)
def test_language_model_of_a_wrapper_is_served(which: str, names: str, tmp_path: Path) -> None:
    model_type, changes = TEXTS[which]
    config = AutoConfig.for_model(
        model_type,
        text_config={**TINY, **changes},
        vision_config=VISIONS.get(model_type, VISION),
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    save_file({renamed(name, NAMES[names]): t.contiguous() for name, t in model.state_dict().items()},
              tmp_path / "model.safetensors")  # fmt: skip
    assert any("vision_tower" in name for name in load_file(tmp_path / "model.safetensors"))
    check_files(tmp_path)
    runner = make_runner(tmp_path, num_blocks=16)
    prompt = torch.randint(3, 999, (21,), generator=torch.Generator().manual_seed(2)).tolist()
    outputs, _ = generate(runner, [make_request(prompt, "p", max_tokens=20, ignore_eos=True)], max_num_seqs=1,
                          max_num_batched_tokens=16)  # fmt: skip
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + outputs["p"][:-1]])).logits[0, -20:]
    shortfalls = logits.amax(-1) - logits.gather(1, torch.tensor(outputs["p"])[:, None])[:, 0]
    assert max(shortfalls.tolist()) < FP32_MARGIN


def test_wrapper_defaults_missing_from_config_are_known() -> None:
    """The files of Gemma 3 4B give neither the vocabulary size nor the head counts."""
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
             "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    found = text_part({"model_type": "gemma3", "text_config": inner})
    assert (found["vocab_size"], found["max_position_embeddings"]) == (262_208, 131_072)
    spec = spec_from_json(found, {})
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.tie_word_embeddings) == (8, 4, 256, True)
    assert [attention.window for attention in spec.attentions[:7]] == [1024] * 5 + [0, 1024]
    ropes = [attention.rope for attention in spec.attentions[4:6]]
    assert [rope.theta for rope in ropes] == [10_000.0, 1_000_000.0]
    assert ropes[0].scaling is None and ropes[1].scaling is not None and ropes[1].scaling.factor == 8.0


def test_wrapper_fields_apply_to_the_language_model() -> None:
    config = {"model_type": "outer", "eos_token_id": 7, "tie_word_embeddings": True, "vision_config": {"a": 1}}
    inner = {"model_type": "llama", "tie_word_embeddings": False}
    unwrapped = {"model_type": "llama", "tie_word_embeddings": False, "eos_token_id": 7}
    assert text_part({**config, "text_config": inner}) == unwrapped
    assert text_part(inner) is inner


def test_generation_config_overrides_eos_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert read_model_files(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert read_model_files(tmp_path).eos_token_ids == (2, 3)


def test_gemma4_is_refused_by_name(tmp_path: Path) -> None:
    text = {**TINY, "model_type": "gemma4_text"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
    with pytest.raises(ValueError, match=r"config\.json: Gemma 4 is not supported: .*heads of 512"):
        check_files(tmp_path)
