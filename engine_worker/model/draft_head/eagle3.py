"""The weights of an EAGLE-3 head, and its forward pass over the target's KV pool.

fc(hidden states of some layers of the target)                             once per step
[ norm(embedding) | norm(hidden) ] -> attention -> MLP -> norm -> head     once per draft

"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.devices import DeviceStep
from engine_worker.model.draft_head.eagle3_spec import Eagle3Spec
from engine_worker.model.layers import RotaryTable
from engine_worker.model.linear import LinearMethod, LinearSpec
from engine_worker.model.network import Network
from engine_worker.model.norm_of_sum import NormShapes, add_norm
from engine_worker.model.parallel_linear import ParallelMethod
from engine_worker.model.parts.attention import load_attention
from engine_worker.model.parts.load import load_mlp
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.quantization import linear_method
from engine_worker.model.specs.attention import AttentionSpec
from engine_worker.model.specs.names import NamesSpec
from engine_worker.model.specs.part import Role
from engine_worker.model.tensor_parallel import TensorParallel
from engine_worker.model.weight_format import DENSE
from engine_worker.model.weights import ShardedWeights, WeightSource

_PREFIXES = ("midlayer.", "model.layers.0.")  # of the layer, in checkpoints of EAGLE and of speculators
_UNUSED = ("^t2d$",)  # which tokens have a draft id; d2t has the same


class Eagle3Head:
    reads_output = False

    def __init__(
        self, spec: Eagle3Spec, network: Network, weights: WeightSource, max_len: int, ranks: TensorParallel
    ) -> None:
        """Load the head. Arguments and errors are those of load_draft_head()."""
        self.layer, self.tapped_layers, size = spec.layer, spec.tapped_layers, spec.hidden_size
        self._keeps_normed, self._ranks = spec.keeps_normed, ranks
        cache_layer = len(network.spec.cache_layers)
        prefix = next((one for one in _PREFIXES if f"{one}hidden_norm.weight" in weights.names), _PREFIXES[0])
        stored, shapes, names = linear_method(DENSE, weights.device.type), NormShapes(size, spec.norm_eps), NamesSpec()
        method: LinearMethod = stored
        if ranks.size > 1:
            self.layer = spec.layer.share(ranks.rank, ranks.size)
            method = ParallelMethod(stored, ranks, spec.draft_vocab_size)
            weights = _own_weights(spec, prefix, names, weights, ranks)
        attention, rope = self.layer.mixer, spec.attention.rope
        assert isinstance(attention, AttentionSpec) and self.layer.mlp is not None, "checked when the head was read"
        table = RotaryTable.of(0, rope, spec.attention.head_dim, max_len, weights.device)
        source = LayerSource(
            weights, method, names, prefix, shapes, {rope: table}, 0, range(cache_layer, cache_layer + 1),
            mixer_inputs=2 * size,
        )  # fmt: skip
        taps = LinearSpec(
            role=Role.DOWN, names=("fc",), outputs=(size,), inputs=len(spec.tapped_layers) * size, bias=False
        )
        self._fc = stored.load(taps, weights)  # every rank computes it and the head alone
        self._embedding_norm, self._hidden_norm, self._mlp_norm, self._norm = (
            shapes.weight(weights.get(name, (size,)))
            for name in (
                f"{prefix}{names.before_attention}.weight",
                f"{prefix}hidden_norm.weight",
                f"{prefix}{names.before_mlp}.weight",
                names.norm,
            )
        )
        self._attention = load_attention(attention, source)
        self._mlp = load_mlp(self.layer.mlp, source)
        head = weights.get(names.head, (spec.draft_vocab_size, size))
        self._head = stored.head(head, names.head, weights)
        self._token_ids = _token_ids(spec, weights)
        self._embedding = _own_embedding(weights, names.embedding, network.embedding)
        weights.check_all_used(_UNUSED)

    def combine(self, taps: Tensor) -> Tensor:
        """See DraftHead."""
        return self._fc(taps)

    def store(self, step: DeviceStep, token_ids: Tensor, hidden: Tensor) -> None:
        """See DraftHead."""
        self._attention.store(step, self._entering(step, token_ids, hidden)[0])

    def __call__(
        self, step: DeviceStep, token_ids: Tensor, hidden: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See DraftHead."""
        x, residual = self._entering(step, token_ids, hidden)
        attended = self._attention(step, x, rows)
        residual = residual if rows is None else residual[rows]
        entering, residual = add_norm(step, attended, residual, self._mlp_norm)
        normed, hidden = add_norm(step, self._mlp(entering), residual, self._norm)
        # All ranks have the same bits; the drafts go into their keys and values, so nothing is left to chance.
        best = self._ranks.broadcast(self._head(normed).argmax(dim=-1))
        return best if self._token_ids is None else self._token_ids[best], hidden

    def _entering(self, step: DeviceStep, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention's input [T, 2 H], and the residual."""
        normed = step.rms_norm(hidden, self._hidden_norm)
        embedded = step.rms_norm(F.embedding(token_ids, self._embedding), self._embedding_norm)
        return torch.cat((embedded, normed), dim=1), normed if self._keeps_normed else hidden


def _own_weights(
    spec: Eagle3Spec, prefix: str, names: NamesSpec, weights: WeightSource, ranks: TensorParallel
) -> WeightSource:
    """Return this rank's part of the layer's weights; queries, keys and values read two hidden states."""
    size, entering = spec.hidden_size, {f"{name}.weight" for name in names.qkv}
    shapes = {
        prefix + tensor.name: (tensor.shape[0], 2 * size) if tensor.name in entering else tensor.shape
        for tensor in spec.layer.tensors(names, size)
    }
    parts = spec.layer.parts(names, size, ranks.rank, ranks.size)
    return ShardedWeights(weights, shapes, {prefix + name: part for name, part in parts})


def _token_ids(spec: Eagle3Spec, weights: WeightSource) -> Tensor | None:
    """Return the target's token id of each draft id [draft_vocab_size]; None: they are equal.

    `d2t` has the differences. A head of random weights drafts token 0, so that a benchmark can make all drafts right.
    """
    if not weights.names:
        return torch.zeros(spec.draft_vocab_size, dtype=torch.int64, device=weights.device)
    if "d2t" not in weights.names:
        if spec.draft_vocab_size != spec.vocab_size:
            raise ValueError("--speculative-config: model: the safetensors files have no d2t, the ids of the drafts")
        return None
    ids = torch.arange(spec.draft_vocab_size, device=weights.device)
    ids += weights.get("d2t", (spec.draft_vocab_size,), dtype=torch.int64)
    if not 0 <= int(ids.min()) <= int(ids.max()) < spec.vocab_size:
        raise ValueError(f"--speculative-config: model: d2t: expected token ids from 0 to {spec.vocab_size - 1}")
    return ids


def _own_embedding(weights: WeightSource, name: str, embedding: Tensor) -> Tensor:
    """Return the head's embedding if it has another one than the target."""
    if name not in weights.names:
        return embedding
    own = weights.get(name, tuple(embedding.shape))
    return embedding if torch.equal(own, embedding) else own
