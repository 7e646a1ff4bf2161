"""A decoder-only network: token ids and a paged KV pool in, logits out. A ServedModel.

    embedding -> [ norm -> qkv -> attention -> o -> norm -> gate_up -> down ] * num_layers -> norm -> head

The ModelSpec defines all differences between families, such as the places of norms. Differences between devices are in
the DeviceStep. The only state is the weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.kv.layout import Place
from engine_worker.model.devices import Device, DeviceStep, attach_device
from engine_worker.model.kv_scales import read_kv_scales
from engine_worker.model.layers import NormWeight, RotaryTable
from engine_worker.model.linear import Input, LinearMethod
from engine_worker.model.model_input import ModelInput
from engine_worker.model.norm_of_sum import NormShapes, add_norm, add_norm_quantized, takes_sums
from engine_worker.model.parts.attention import Attention
from engine_worker.model.parts.load import Mixer, Mlp, load_mixer, load_mlp
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.quantization import dense_tensor, linear_method
from engine_worker.model.served_model import StepOutput
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.attention import RopeSpec
from engine_worker.model.tensor_parallel import SINGLE, TensorParallel
from engine_worker.model.weights import WeightSource
from kernels.fp8_kv import UNIT_SCALES
from kernels.scaled import Scaling

Module = TypeVar("Module")


class Taps(Protocol):
    """Copies hidden states for a draft head."""

    needs_output: bool  # the normed output of all rows, not only of those with logits

    def entered(self, layer: int, hidden: Tensor, residual: Tensor) -> None:
        """Take the two summands of a layer's input, [T, H] each."""

    def left(self, normed: Tensor) -> None:
        """Take the normed output of the last layer, [T, H], if it is needed."""


@dataclass(frozen=True, slots=True)
class _Part(Generic[Module]):
    """A mixer or an MLP with the norms around it."""

    module: Module
    norm_before: NormWeight | None
    norm_after: NormWeight | None


class DecoderLayer:
    def __init__(self, spec: LayerSpec, source: LayerSource, shapes: NormShapes) -> None:
        names = source.names

        def norm(name: str, is_there: bool, *, is_of_sum: bool = False) -> NormWeight | None:
            make = shapes.of_sum if is_of_sum else shapes.weight
            return make(source.weights.get(f"{source.prefix}{name}.weight", (shapes.size,))) if is_there else None

        has_sum = source.index > 0  # of an earlier part
        self._residual_scale = spec.residual_scale
        self._mixer: _Part[Mixer] | None = None
        if spec.mixer is not None:
            self._mixer = _Part(
                load_mixer(spec.mixer, source),
                norm(names.before_attention, spec.norms_before, is_of_sum=has_sum),
                norm(names.after_attention, spec.norms_after),
            )
            has_sum = True
        self._mlp: _Part[Mlp] | None = None
        if spec.mlp is not None:
            self._mlp = _Part(
                load_mlp(spec.mlp, source),
                norm(names.before_mlp, spec.norms_before, is_of_sum=has_sum),
                norm(names.after_mlp, spec.norms_after),
            )

    def __call__(
        self, step: DeviceStep, hidden: Tensor, residual: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer and return (hidden, residual).

        Args:
            step: Operators of this step.
            hidden: Output of the previous layer, not yet added to `residual`; or a rank's part of it.
            residual: [T, H].
            rows: int64 rows of the result that are needed; KV is stored for all rows.
        """
        if (mixer := self._mixer) is not None:
            entering, residual = _enter(step, hidden, residual, mixer.norm_before, mixer.module)
            hidden = self._leave(step, mixer.module(step, entering, rows), mixer.norm_after)
        elif rows is not None:
            hidden = hidden[rows]
        residual = residual if rows is None else residual[rows]
        if (mlp := self._mlp) is not None:
            entering, residual = _enter(step, hidden, residual, mlp.norm_before, mlp.module)
            hidden = self._leave(step, mlp.module(entering), mlp.norm_after)
        return hidden, residual

    def store(self, step: DeviceStep, residual: Tensor) -> None:
        """Store the keys and values of all rows of the input [T, H], and compute nothing else."""
        assert self._mixer is not None, "a layer that attends"
        attention = self._mixer.module
        assert isinstance(attention, Attention), "a layer that attends"
        entering, _ = _enter(step, torch.zeros_like(residual), residual, self._mixer.norm_before, attention)
        attention.store(step, entering)

    def _leave(self, step: DeviceStep, hidden: Tensor, norm: NormWeight | None) -> Tensor:
        """Norm and scale what a part adds to the residual."""
        if norm is not None:
            hidden = step.rms_norm(hidden, norm)
        return hidden if self._residual_scale == 1.0 else step.multiply(hidden, self._residual_scale)


def _enter(
    step: DeviceStep, hidden: Tensor, residual: Tensor, norm: NormWeight | None, module: Mixer | Mlp
) -> tuple[Input, Tensor]:
    """Return the input of a part, quantized as it wants if normed, and the residual it adds to."""
    if norm is not None:
        if module.scaling is Scaling.NONE:
            return add_norm(step, hidden, residual, norm)
        return add_norm_quantized(step, hidden, residual, norm, module.scaling, module.reads_plain)
    residual = residual + hidden
    return residual, residual


class Network:
    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        max_len: int,
        is_deterministic: bool = False,
        method: LinearMethod | None = None,
        ranks: TensorParallel = SINGLE,
    ) -> None:
        """Load the network.

        Args:
            spec: The network; with several ranks, this rank's part.
            weights: The checkpoint; with several ranks, this rank's part.
            max_len: Positions of the rotary tables.
            is_deterministic: Use batch-invariant kernels.
            method: Loads linear layers; default: that of the checkpoint's format and device.
            ranks: The ranks that share the model.
        """
        self.spec, self._is_deterministic = spec, is_deterministic
        self.is_whole = ranks.size == 1  # not a rank's part
        method, names = method or linear_method(spec.quantization, weights.device.type, is_deterministic), spec.names
        self._embedding = weights.get(names.embedding, (spec.vocab_size, spec.hidden_size))
        tables = _rotary_tables(spec, max_len, self._embedding.device)
        shapes = NormShapes(
            spec.hidden_size,
            spec.norm_eps,
            ranks,
            spec.norm_offset,
            takes_sums=takes_sums(spec.layers, ranks),
            is_deterministic=is_deterministic,
        )
        self._takes_sums = shapes.takes_sums
        self._all_reduce = ranks.all_reduce_in_order if is_deterministic else ranks.all_reduce
        ends = list(accumulate(spec.num_cache_layers, initial=0))
        self._layers = [
            DecoderLayer(
                layer,
                LayerSource(
                    weights,
                    method,
                    names,
                    names.layer.format(index=index),
                    shapes,
                    tables,
                    index,
                    range(*ends[index : index + 2]),
                    spec.num_states_before[index],
                    is_summed=not shapes.takes_sums,
                    reduce=self._all_reduce,
                ),
                shapes,
            )
            for index, layer in enumerate(spec.layers)
        ]
        self._norm = shapes.of_sum(weights.get(names.norm, (spec.hidden_size,)))
        self._embedding_scale = _embedding_scale(spec, self.dtype)
        head = names.embedding if spec.tie_word_embeddings else names.head
        self.head = method.head(self._head_weight(weights), head, weights)  # [N, H] to [N, V], before scaled_logits()
        self._kv_scales = read_kv_scales(weights, spec)

    def _head_weight(self, weights: WeightSource) -> Tensor:
        spec = self.spec
        first, end = spec.head_rows or (0, spec.vocab_size)
        if spec.tie_word_embeddings:
            return self._embedding[first:end]
        return dense_tensor(weights, spec.quantization, spec.names.head, (end - first, spec.hidden_size))

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def embedding(self) -> Tensor:
        """The embedding [V, H]."""
        return self._embedding

    def attach(
        self,
        kv_pool: Tensor,
        places: Sequence[Place] = (),
        states: Tensor | None = None,
        others: tuple[LayerSpec, ...] = (),
    ) -> Device:
        """Return the device state; see ServedModel. `others`: layers of another network, the last ones of the pool."""
        spec, scales = replace(self.spec, layers=self.spec.layers + others), self._kv_scales
        if scales:
            scales = (*scales, *(UNIT_SCALES for _ in others))
        return attach_device(spec, kv_pool, self.dtype, self._is_deterministic, scales, places, states)

    @torch.inference_mode()
    def forward(
        self,
        model_input: ModelInput,
        device: Device,
        look: Callable[[StepOutput], None] | None = None,
        logits: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Compute logits; see ServedModel. `taps` may copy hidden states."""
        step = device.begin_step(model_input)
        residual = self.embed(model_input.token_ids)
        wanted, reads_output = model_input.logits_indices, taps if taps is not None and taps.needs_output else None
        rows = wanted if look is None and reads_output is None else None
        hidden, residual = self.through_layers(step, torch.zeros_like(residual), residual, rows, taps)
        if look is not None:
            output = StepOutput(
                logits=lambda rows: self._logits_of(step, hidden[rows], residual[rows]),
                hidden=lambda rows: add_norm(step, hidden[rows], residual[rows], self._norm)[0],
            )
            look(output)
        if reads_output is not None:
            normed, _ = add_norm(step, hidden, residual, self._norm)
            reads_output.left(normed)
            return self.scaled_logits(self.head(normed[wanted], logits))
        if rows is None:
            hidden, residual = hidden[wanted], residual[wanted]
        return self._logits_of(step, hidden, residual, logits)

    def summed(self, hidden: Tensor) -> Tensor:
        """Return what a layer adds, [T, H], summed over the ranks if otherwise the next norm sums it."""
        return self._all_reduce(hidden.clone()) if self._takes_sums else hidden

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed token ids [T] as [T, H]."""
        embedded = F.embedding(token_ids, self._embedding)
        return embedded if self._embedding_scale == 1.0 else embedded * self._embedding_scale

    def through_layers(
        self,
        step: DeviceStep,
        hidden: Tensor,
        residual: Tensor,
        rows: Tensor | None = None,
        taps: Taps | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run all layers and return the last summand and the residual without it, of `rows` if given.

        Args:
            step: Operators of this step.
            hidden: Zeros like `residual`; may be overwritten.
            residual: From embed(); may be overwritten.
            rows: int64 rows of the result that are needed.
            taps: May copy the inputs of the layers.
        """
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            if taps is not None:
                taps.entered(index, hidden, residual)
            # What the last layer computes after its keys and values is only used for logits: for one token of a
            # prompt's chunk, or none.
            hidden, residual = layer(step, hidden, residual, rows if index == last else None)
        return hidden, residual

    def multiplied_by_head(
        self, step: DeviceStep, hidden: Tensor, residual: Tensor, logits: Tensor | None = None
    ) -> Tensor:
        """Apply the final norm and the output head."""
        normed, _ = add_norm(step, hidden, residual, self._norm)
        return self.head(normed, logits)

    def _logits_of(self, step: DeviceStep, hidden: Tensor, residual: Tensor, logits: Tensor | None = None) -> Tensor:
        return self.scaled_logits(self.multiplied_by_head(step, hidden, residual, logits))

    def scaled_logits(self, logits: Tensor) -> Tensor:
        """Scale and cap logits in place."""
        if self.spec.logit_scale != 1.0:
            logits.mul_(self.spec.logit_scale)
        cap = self.spec.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def _rotary_tables(spec: ModelSpec, max_len: int, device: torch.device) -> dict[RopeSpec, RotaryTable]:
    ropes = dict.fromkeys(attention.rope for attention in spec.attentions)
    return {rope: RotaryTable.of(index, rope, spec.head_dim, max_len, device) for index, rope in enumerate(ropes)}


def _embedding_scale(spec: ModelSpec, dtype: torch.dtype) -> float:
    return (
        torch.tensor(spec.embedding_scale, dtype=dtype).item() if spec.rounds_embedding_scale else spec.embedding_scale
    )
