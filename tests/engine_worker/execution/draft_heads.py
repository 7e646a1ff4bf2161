"""Random EAGLE-3 heads, and their drafts computed in plain torch from the hidden states of transformers.

write_head(directory, target)                   write a head for the model in `target`
HeadReference(directory, target).drafts(t, 3)   the drafts that follow the tokens t
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine_worker.execution.reference import load_transformers

DRAFT_TOKENS = (7, 9)  # of a head with a small vocabulary


def write_head(
    directory: Path, target: Path, *, tokens: tuple[int, ...] = (), prefix: str = "midlayer.", **changes: Any
) -> Path:
    """Write a head whose drafts are among `tokens`, or any token."""
    directory.mkdir(parents=True, exist_ok=True)
    of_target = json.loads((target / "config.json").read_text())
    shared = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {name: of_target[name] for name in (*shared, "vocab_size", "rms_norm_eps", "hidden_act")}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"draft_vocab_size": len(tokens) or config["vocab_size"], **changes}
    (directory / "config.json").write_text(json.dumps(config))
    size, inner, heads = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = heads * config["num_attention_heads"], heads * config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    tensors = {
        "fc.weight": random(size, 3 * size),
        f"{prefix}self_attn.q_proj.weight": random(queries, 2 * size),
        f"{prefix}self_attn.k_proj.weight": random(keys, 2 * size),
        f"{prefix}self_attn.v_proj.weight": random(keys, 2 * size),
        f"{prefix}self_attn.o_proj.weight": random(size, queries),
        f"{prefix}mlp.gate_proj.weight": random(inner, size),
        f"{prefix}mlp.up_proj.weight": random(inner, size),
        f"{prefix}mlp.down_proj.weight": random(size, inner),
        "lm_head.weight": random(config["draft_vocab_size"], size),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = torch.rand(size, generator=generator) + 0.5
    tensors["norm.weight"] = torch.rand(size, generator=generator) + 0.5
    if tokens:
        tensors["d2t"] = torch.tensor(tokens) - torch.arange(len(tokens))
        tensors["t2d"] = torch.isin(torch.arange(config["vocab_size"]), torch.tensor(tokens))
    save_file(tensors, directory / "model.safetensors")
    return directory


class HeadReference:
    def __init__(self, directory: Path, target: Path) -> None:
        self._target = load_transformers(target, dtype=torch.float32)
        self._config = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        self._weights = {name.removeprefix("midlayer.").removesuffix(".weight"): t for name, t in stored.items()}

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], number: int) -> list[int]:
        """Return the drafts after `token_ids`. The target has computed all of these except the last."""
        states = self._target(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        num_layers = len(states) - 1
        layers = self._config.get("eagle_aux_hidden_state_layer_ids") or (2, num_layers // 2, num_layers - 3)
        hidden = torch.cat([states[layer][0] for layer in layers], dim=1) @ self._weights["fc"].T
        following, drafts = token_ids[1:], []
        for _ in range(number):
            last, draft = self._next(hidden, following)
            hidden, following = torch.cat((hidden, last[None])), [*following, draft]
            drafts.append(draft)
        return drafts

    def _next(self, hidden: Tensor, following: list[int]) -> tuple[Tensor, int]:
        """Return the hidden state and the draft after the last position."""
        weights = self._weights
        embedded = self._target.get_input_embeddings()(torch.tensor(following))
        normed = self._norm(hidden, "hidden_norm")
        x = torch.cat((self._norm(embedded, "input_layernorm"), normed), dim=1)
        residual = normed if self._config.get("norm_before_residual") else hidden
        residual = residual + self._attention(x) @ weights["self_attn.o_proj"].T
        x = self._norm(residual, "post_attention_layernorm")
        gate, up = (x @ weights[f"mlp.{name}_proj"].T for name in ("gate", "up"))
        residual = residual + (torch.nn.functional.silu(gate) * up) @ weights["mlp.down_proj"].T
        best = int((self._norm(residual[-1:], "norm") @ weights["lm_head"].T).argmax())
        return residual[-1], best + (int(weights["d2t"][best]) if "d2t" in weights else 0)

    def _attention(self, x: Tensor) -> Tensor:
        config, size = self._config, self._config["head_dim"]
        angles = torch.outer(torch.arange(len(x)), 10_000.0 ** (-torch.arange(0, size, 2) / size))
        query, key, value = (
            (x @ self._weights[f"self_attn.{name}_proj"].T).view(len(x), -1, size).transpose(0, 1) for name in "qkv"
        )
        query, key = _rotated(query, angles), _rotated(key, angles)
        repeats = config["num_attention_heads"] // config["num_key_value_heads"]
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0), is_causal=True
        )
        return attended.transpose(0, 1).flatten(1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self._weights[name], self._config["rms_norm_eps"])


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )
