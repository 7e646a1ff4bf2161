"""Random layers for multi-token prediction, and their drafts computed by transformers.

write_mtp(directory)                 add a layer to the checkpoint of a family's model
MtpReference(directory).drafts(t, 3)   the drafts that follow the tokens t
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine_worker.execution.reference import load_transformers

QWEN = {
    "mtp_block.": "mtp.layers.0.",
    "eh_proj.": "mtp.fc.",
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "post_norm.": "mtp.norm.",
}


def write_mtp(directory: Path, tokens: tuple[int, int] | None = None, *, is_stacked: bool = False) -> Path:
    """Add the layer to a model.

    With `tokens`, one of both has the highest logit, whatever the hidden state is. With `is_stacked`, a tensor has all
    experts of the layer.
    """
    target = load_transformers(directory)
    layer, generator = _layer(target), torch.Generator().manual_seed(5)
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.data.normal_(0.0, 0.3 if name.endswith("bias") else 0.1, generator=generator)
    stored = load_file(directory / "model.safetensors")
    head = "lm_head.weight" if "lm_head.weight" in stored else "model.embed_tokens.weight"
    if tokens is not None:
        stored[head][tokens[1]] = -stored[head][tokens[0]]
        others = torch.ones(len(stored[head]), dtype=torch.bool)
        others[list(tokens)] = False
        stored[head][others] *= 0.01
    names = _names(target.config)
    for name, tensor in _as_stored(layer, names, is_stacked=is_stacked).items():
        stored[name] = tensor.contiguous()
    if target.config.model_type == "glm4_moe":  # its files repeat what the network has
        prefix = names["mtp_block."]
        stored |= {f"{prefix}shared_head.head.weight": stored[head].clone()}
        stored |= {f"{prefix}embed_tokens.weight": stored["model.embed_tokens.weight"].clone()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _layer(target: Any) -> Any:
    """Return a layer of the target's classes, as transformers makes it for families whose MTP it knows."""
    from transformers.modeling_layers import MtpLayer  # noqa: PLC0415 - as in reference.py

    config, last = deepcopy(target.config), target.get_decoder().layers[-1]
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"]
    if getattr(config, "first_k_dense_replace", None) is not None:
        config.first_k_dense_replace = 0
    norm = type(next(module for name, module in last.named_modules() if "norm" in name))
    return MtpLayer(config, type(last), norm, 0).eval()


def _names(config: Any) -> dict[str, str]:
    """Return the checkpoint's names of the parts of a layer."""
    if config.model_type != "glm4_moe":
        return QWEN
    prefix = f"model.layers.{config.num_hidden_layers}."
    return {
        "mtp_block.": prefix,
        **{name: prefix + name for name in ("eh_proj.", "enorm.", "hnorm.")},
        "post_norm.": f"{prefix}shared_head.norm.",
    }


def _as_stored(layer: Any, names: dict[str, str], *, is_stacked: bool) -> dict[str, Tensor]:
    """Return the parts of the layer's memory by the checkpoint's names.

    There is one tensor per expert, or, with `is_stacked`, those of transformers.
    """
    stored = {}
    for own_name, tensor in layer.state_dict().items():
        part = next(part for part in names if own_name.startswith(part))
        name = names[part] + own_name.removeprefix(part)
        experts, _, kind = name.rpartition(".")
        if is_stacked or not experts.endswith(".experts"):
            stored[name] = tensor
            continue
        for number, matrix in enumerate(tensor):
            parts = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
            for linear, weight in zip(("gate_proj", "up_proj") if len(parts) == 2 else (kind,), parts, strict=True):
                stored[f"{experts}.{number}.{linear}.weight"] = weight
    return stored


class MtpReference:
    def __init__(self, directory: Path) -> None:
        self._target = load_transformers(directory, dtype=torch.float32, attn_implementation="eager")
        self._layer = _layer(self._target)
        self._states: list[tuple[list[int], Tensor]] = []
        stored, names = load_file(directory / "model.safetensors"), _names(self._target.config)
        is_stacked = "mtp.layers.0.mlp.experts.down_proj" in stored
        for name, tensor in _as_stored(self._layer, names, is_stacked=is_stacked).items():
            tensor.copy_(stored[name])

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], number: int) -> list[int]:
        """Return the drafts after `token_ids`. The target has computed all of these except the last."""
        rotary = self._target.get_decoder().rotary_emb
        sections = (3,) if hasattr(rotary, "mrope_section") else ()  # text has one position for all three
        target, hidden = self._target, self._hidden_states(token_ids[:-1])
        following, drafts = token_ids[1:], []
        for _ in range(number):
            positions = torch.arange(len(following))[None]
            embedded = target.get_input_embeddings()(torch.tensor([following]))
            mask = torch.full((len(following), len(following)), -torch.inf).triu(1)[None, None]
            leaving = self._layer(
                embedded,
                hidden,
                position_embeddings=rotary(embedded, positions.expand(*sections, *positions.shape)),
                attention_mask=mask,
                position_ids=positions,
                past_key_values=None,
            )
            draft = int(target.lm_head(leaving[0, -1]).argmax())
            hidden, following = torch.cat((hidden, leaving[:, -1:]), dim=1), [*following, draft]
            drafts.append(draft)
        return drafts

    def _hidden_states(self, token_ids: list[int]) -> Tensor:
        """Return those of the target; they are also those of a text that begins so."""
        for text, states in self._states:
            if text[: len(token_ids)] == token_ids:
                return states[:, : len(token_ids)]
        states = self._target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1]
        self._states.append((token_ids, states))
        return states
