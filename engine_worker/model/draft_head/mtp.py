"""The layer for multi-token prediction (MTP) of a network's checkpoint, as a draft head.

    project([ norm(embedding) | norm(hidden) ]) -> layer -> norm -> the network's head      once per draft

The hidden states are the network's after its last norm, then the layer's after its own
(DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2). The embedding and the head are those of the network.
"""

from dataclasses import replace

import torch
from torch import Tensor

from engine_worker.model.checkpoint_tensors import checkpoint_tensors
from engine_worker.model.devices import DeviceStep
from engine_worker.model.layers import RotaryTable
from engine_worker.model.linear import LinearMethod, LinearSpec
from engine_worker.model.network import DecoderLayer, Network
from engine_worker.model.norm_of_sum import NormShapes, add_norm
from engine_worker.model.parallel_linear import ParallelMethod
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.quantization import linear_method
from engine_worker.model.sharding import tensor_parts
from engine_worker.model.spec import LayerSpec, ModelSpec, MtpSpec
from engine_worker.model.specs.attention import AttentionSpec
from engine_worker.model.specs.names import NamesSpec
from engine_worker.model.specs.part import Role
from engine_worker.model.tensor_parallel import TensorParallel
from engine_worker.model.weights import ShardedWeights, WeightSource

# Copies of the network's, in checkpoints where the layer is one more layer of the network.
_SHARED = (r"\.shared_head\.head\.weight$", r"\.embed_tokens\.weight$")


class MtpHead:
    reads_output = True
    tapped_layers: tuple[int, ...] = ()

    def __init__(
        self, spec: MtpSpec, network: Network, weights: WeightSource, max_len: int, ranks: TensorParallel
    ) -> None:
        """Load the layer. Arguments and errors are those of load_draft_head()."""
        self.layer, self._network, self._ranks = spec.layer, network, ranks
        self._is_random = not weights.names
        target, size, names = network.spec, network.spec.hidden_size, spec.layer_names
        names = replace(names, experts=names.experts.as_stored(weights.names))
        stored = linear_method(target.quantization, weights.device.type)
        method: LinearMethod = stored
        if ranks.size > 1:
            self.layer = spec.layer.share(ranks.rank, ranks.size)
            method = ParallelMethod(stored, ranks, target.vocab_size)
            weights = _own_weights(spec.layer, replace(names, layer=spec.names.layer), target, weights, ranks)
        shapes = NormShapes(size, target.norm_eps, offset=target.norm_offset)
        cache_layer = len(target.cache_layers)
        mixer = self.layer.mixer
        assert isinstance(mixer, AttentionSpec), "of all families"
        table = RotaryTable.of(0, mixer.rope, mixer.head_dim, max_len, weights.device)
        source = LayerSource(
            weights,
            method,
            names,
            spec.names.layer,
            shapes,
            {mixer.rope: table},
            0,
            range(cache_layer, cache_layer + 1),
            reduce=ranks.all_reduce,
        )
        self._embedding_norm, self._hidden_norm, self._norm = (
            shapes.weight(weights.get(f"{name}.weight", (size,)))
            for name in (spec.names.embedding_norm, spec.names.hidden_norm, spec.names.norm)
        )
        project = LinearSpec(role=Role.DOWN, names=(spec.names.project,), outputs=(size,), inputs=2 * size, bias=False)
        self._project = stored.load(project, weights)  # every rank computes it all
        self._layer = DecoderLayer(self.layer, source, shapes)
        weights.check_all_used(_SHARED)

    def combine(self, taps: Tensor) -> Tensor:
        """See DraftHead."""
        return taps

    def store(self, step: DeviceStep, token_ids: Tensor, hidden: Tensor) -> None:
        """See DraftHead."""
        self._layer.store(step, self._entering(step, token_ids, hidden))

    def __call__(
        self, step: DeviceStep, token_ids: Tensor, hidden: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See DraftHead."""
        entering = self._entering(step, token_ids, hidden)
        leaving, residual = self._layer(step, torch.zeros_like(entering), entering, rows)
        normed, _ = add_norm(step, leaving, residual, self._norm)
        drafts = self._ranks.broadcast(self._network.head(normed).argmax(dim=-1))  # only rank 0 has all logits
        # Random weights draft token 0, so that a benchmark can make all drafts right.
        return drafts.zero_() if self._is_random else drafts, normed

    def _entering(self, step: DeviceStep, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's input [T, H]."""
        embedded = step.rms_norm(self._network.embed(token_ids), self._embedding_norm)
        return self._project(torch.cat((embedded, step.rms_norm(hidden, self._hidden_norm)), dim=1))


def _own_weights(
    layer: LayerSpec, names: NamesSpec, target: ModelSpec, weights: WeightSource, ranks: TensorParallel
) -> WeightSource:
    """Return this rank's part of the layer's weights."""
    alone = replace(target, layers=(layer,), names=names)
    return ShardedWeights(weights, checkpoint_tensors(alone), tensor_parts(alone, ranks.rank, ranks.size))
