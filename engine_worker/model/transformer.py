"""The Llama network: token ids and a paged KV pool in, logits of the wanted rows out.

    embedding -> [ norm -> qkv -> attention -> o -> norm -> gate_up -> down ] * num_layers -> norm -> head

Reads as the network; what differs between devices is in CpuStep and CudaStep, chosen by the pool's device. It has no
state but its weights: the KV pool is an argument.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.config import ModelConfig
from engine_worker.model.layers import Linear, NormWeight, OutputHead, RotaryEmbedding
from engine_worker.model.model_input import ModelInput
from engine_worker.model.weights import WeightSource

LogitsOf: TypeAlias = Callable[[Tensor], Tensor]  # rows [M] int64 of the step's tokens -> [M, vocab_size]


class DeviceStep(Protocol):
    """The operators of one forward pass on one device."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]: ...
    def linear(self, x: Tensor, linear: Linear) -> Tensor: ...
    def gated_linear(self, x: Tensor, gate_up: Linear) -> Tensor: ...
    def rotate_and_store(self, qkv: Tensor, layer: int) -> None: ...
    def attend(self, qkv: Tensor, layer: int, rows: Tensor | None = None) -> Tensor: ...
    def logits(self, x: Tensor, head: OutputHead, logits: Tensor | None) -> Tensor: ...


class Device(Protocol):
    """A device with a KV pool on it."""

    def begin_step(self, model_input: ModelInput) -> DeviceStep: ...


class DecoderLayer:
    def __init__(self, config: ModelConfig, weights: WeightSource, index: int) -> None:
        prefix = f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._index = index
        eps = config.rms_norm_eps
        self._input_norm = NormWeight(weights.get(f"{prefix}.input_layernorm.weight", (hidden,)), eps)
        self._qkv = Linear(
            torch.cat(
                [
                    weights.get(f"{prefix}.self_attn.q_proj.weight", (query, hidden)),
                    weights.get(f"{prefix}.self_attn.k_proj.weight", (key_value, hidden)),
                    weights.get(f"{prefix}.self_attn.v_proj.weight", (key_value, hidden)),
                ]
            )
        )
        self._o = Linear(weights.get(f"{prefix}.self_attn.o_proj.weight", (hidden, query)))
        self._post_attention_norm = NormWeight(weights.get(f"{prefix}.post_attention_layernorm.weight", (hidden,)), eps)
        self._gate_up = Linear(
            torch.cat(
                [
                    weights.get(f"{prefix}.mlp.gate_proj.weight", (inner, hidden)),
                    weights.get(f"{prefix}.mlp.up_proj.weight", (inner, hidden)),
                ]
            )
        )
        self._down = Linear(weights.get(f"{prefix}.mlp.down_proj.weight", (hidden, inner)))

    def __call__(
        self, step: DeviceStep, hidden: Tensor, residual: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`hidden` is what the layer before computed and not yet added to `residual`.

        `rows` (int64): only these of the result are wanted; the KV is stored of all.
        """
        normed, residual = step.add_rms_norm(hidden, residual, self._input_norm)
        qkv = step.linear(normed, self._qkv)
        step.rotate_and_store(qkv, self._index)
        hidden = step.linear(step.attend(qkv, self._index, rows), self._o)
        residual = residual if rows is None else residual[rows]
        normed, residual = step.add_rms_norm(hidden, residual, self._post_attention_norm)
        return step.linear(step.gated_linear(normed, self._gate_up), self._down), residual


class Transformer:
    def __init__(
        self, config: ModelConfig, weights: WeightSource, max_len: int, is_deterministic: bool = False
    ) -> None:
        self.config, self._is_deterministic = config, is_deterministic
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.get("model.embed_tokens.weight", shape)
        self._layers = [DecoderLayer(config, weights, index) for index in range(config.num_layers)]
        self._norm = NormWeight(weights.get("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps)
        self._head = OutputHead(self._embedding if config.tie_word_embeddings else weights.get("lm_head.weight", shape))
        self.rotary = RotaryEmbedding(config, max_len, self._embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def attach(self, kv_pool: Tensor) -> Device:
        """Views of `kv_pool` [num_blocks, L, 2, Hkv, BS, D] as forward() wants them."""
        if kv_pool.is_cuda:
            from engine_worker.model.cuda_step import CudaDevice  # noqa: PLC0415 - imports triton, which a CPU has not

            return CudaDevice(self.config, self.rotary, kv_pool, self._is_deterministic)
        from engine_worker.model.cpu_step import CpuDevice  # noqa: PLC0415

        return CpuDevice(self.config, self.rotary, kv_pool)

    @torch.inference_mode()
    def forward(
        self,
        model_input: ModelInput,
        device: Device,
        look: Callable[[LogitsOf], None] | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Logits [N, vocab_size] float32 of `model_input.logits_indices`, written to `logits` if that is given; the KV
        of all tokens is in the pool afterwards.

        `look` may ask for the logits of other rows, part by part: those of a long prompt would fill the device.
        """
        step = device.begin_step(model_input)
        residual = F.embedding(model_input.token_ids, self._embedding)
        hidden = torch.zeros_like(residual)
        for layer in self._layers[:-1]:
            hidden, residual = layer(step, hidden, residual)
        # What the last layer computes after its keys and values is read for logits alone: of a prompt's part for one
        # token or none.
        wanted = model_input.logits_indices
        hidden, residual = self._layers[-1](step, hidden, residual, wanted if look is None else None)

        def logits_of(hidden: Tensor, residual: Tensor, logits: Tensor | None = None) -> Tensor:
            normed, _ = step.add_rms_norm(hidden, residual, self._norm)
            return step.logits(normed, self._head, logits)

        if look is None:
            return logits_of(hidden, residual, logits)
        look(lambda rows: logits_of(hidden[rows], residual[rows]))
        return logits_of(hidden[wanted], residual[wanted], logits)
