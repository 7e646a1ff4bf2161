"""What one forward pass does on CUDA beside matrix products, by the Triton kernels. Same methods as CpuStep."""

from torch import Tensor

from engine_worker.model.config import ModelConfig
from engine_worker.model.layers import NormWeight, RotaryEmbedding
from engine_worker.model.model_input import ModelInput
from kernels.kv_cache_store import store_kv
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm
from kernels.rotary_embedding import rotary_embedding
from kernels.silu_and_mul import silu_and_mul


class CudaDevice:
    """What outlives a step: the table of rotations and the layers' views of the KV pool."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, kv_pool: Tensor) -> None:
        self.config = config
        self.cos_sin_table = rotary.cos_sin_table
        self.layers = [(kv_pool[:, layer, 0], kv_pool[:, layer, 1]) for layer in range(config.num_layers)]

    def begin_step(self, model_input: ModelInput) -> "CudaStep":
        return CudaStep(self, model_input)


class CudaStep:
    def __init__(self, device: CudaDevice, model_input: ModelInput) -> None:
        self._device = device
        self._input = model_input

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, norm.weight, norm.eps)

    def attention(self, qkv: Tensor, layer: int) -> Tensor:
        """qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq * D]: rotate, store, attend."""
        config, inputs = self._device.config, self._input
        heads = qkv.view(len(qkv), -1, config.head_dim)
        query, key, value = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        query, key = rotary_embedding(query, key, inputs.positions, self._device.cos_sin_table)
        key_cache, value_cache = self._device.layers[layer]
        store_kv(key, value, key_cache, value_cache, inputs.slot_mapping)
        output = paged_attention(
            query,
            key_cache,
            value_cache,
            inputs.block_tables,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.max_query_len,
            inputs.max_seq_len,
            config.head_dim**-0.5,
        )
        return output.flatten(1)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)
