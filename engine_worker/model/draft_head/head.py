"""The weights of an EAGLE-3 head, and its forward pass over the target's KV pool.

    fc(hidden states of some layers of the target)                             once per step
    [ norm(embedding) | norm(hidden) ] -> attention -> MLP -> norm -> head     once per draft

Position p has the target's hidden state of position p and the embedding of the token after it. So the first draft of a
step runs over the rows of the target's step, and further ones feed the head its own output.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.devices import DeviceStep
from engine_worker.model.draft_head.spec import DraftHeadSpec
from engine_worker.model.layers import RotaryTable
from engine_worker.model.linear import LinearSpec
from engine_worker.model.norm_of_sum import NormShapes, add_norm
from engine_worker.model.parts.attention import load_attention
from engine_worker.model.parts.load import load_mlp
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.quantization import linear_method
from engine_worker.model.specs.names import NamesSpec
from engine_worker.model.specs.part import Role
from engine_worker.model.weight_format import DENSE
from engine_worker.model.weights import WeightSource

_PREFIXES = ("midlayer.", "model.layers.0.")  # of the layer, in checkpoints of EAGLE and of speculators
_UNUSED = ("^t2d$",)  # which tokens have a draft id; d2t has the same


class DraftHead:
    def __init__(self, spec: DraftHeadSpec, weights: WeightSource, embedding: Tensor, cache_layer: int, max_len: int):
        """Load the head.

        Args:
            spec: The head.
            weights: Its checkpoint. Every tensor is used.
            embedding: [V, H], of the target.
            cache_layer: Its layer of the KV pool.
            max_len: Positions of the rotary table.

        Raises:
            ValueError: If a tensor is missing, unused or has another shape.
        """
        self.spec, size = spec, spec.hidden_size
        prefix = next((one for one in _PREFIXES if f"{one}hidden_norm.weight" in weights.names), _PREFIXES[0])
        method, shapes, names = linear_method(DENSE, weights.device.type), NormShapes(size, spec.norm_eps), NamesSpec()
        rope = spec.attention.rope
        table = RotaryTable.of(0, rope, spec.attention.head_dim, max_len, weights.device)
        source = LayerSource(
            weights, method, names, prefix, shapes, {rope: table}, 0, range(cache_layer, cache_layer + 1),
            mixer_inputs=2 * size,
        )  # fmt: skip
        taps = LinearSpec(
            role=Role.DOWN, names=("fc",), outputs=(size,), inputs=len(spec.tapped_layers) * size, bias=False
        )
        self._fc = method.load(taps, weights)
        self._embedding_norm, self._hidden_norm, self._mlp_norm, self._norm = (
            shapes.weight(weights.get(name, (size,)))
            for name in (
                f"{prefix}{names.before_attention}.weight",
                f"{prefix}hidden_norm.weight",
                f"{prefix}{names.before_mlp}.weight",
                names.norm,
            )
        )
        self._attention = load_attention(spec.attention, source)
        assert spec.layer.mlp is not None, "checked when the head was read"
        self._mlp = load_mlp(spec.layer.mlp, source)
        head = weights.get(names.head, (spec.draft_vocab_size, size))
        self._head = method.head(head, names.head, weights)
        self._token_ids = _token_ids(spec, weights)
        self._embedding = _own_embedding(weights, names.embedding, embedding)
        weights.check_all_used(_UNUSED)

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self._embedding)

    def combine(self, taps: Tensor) -> Tensor:
        """Return the hidden states [T, H] of the target's in `taps` [T, layers * H]."""
        return self._fc(taps)

    def store(self, step: DeviceStep, token_ids: Tensor, hidden: Tensor) -> None:
        """Store the keys and values of all rows, and compute nothing else."""
        self._attention.store(step, self._entering(step, token_ids, hidden)[0])

    def __call__(
        self, step: DeviceStep, token_ids: Tensor, hidden: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of all rows, and return the drafts that follow `rows`, or all.

        Args:
            step: Operators of this pass.
            token_ids: [T] int64, the token after each row's position.
            hidden: [T, H], of the target or of the pass before.
            rows: [N] int64; each ends a sequence.

        Returns:
            Token ids [N] int64, and the hidden states [N, H] for the next pass.
        """
        x, residual = self._entering(step, token_ids, hidden)
        attended = self._attention(step, x, rows)
        residual = residual if rows is None else residual[rows]
        entering, residual = add_norm(step, attended, residual, self._mlp_norm)
        normed, hidden = add_norm(step, self._mlp(entering), residual, self._norm)
        best = self._head(normed).argmax(dim=-1)
        return best if self._token_ids is None else self._token_ids[best], hidden

    def _entering(self, step: DeviceStep, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention's input [T, 2 H], and the residual."""
        normed = step.rms_norm(hidden, self._hidden_norm)
        embedded = step.rms_norm(self.embed(token_ids), self._embedding_norm)
        return torch.cat((embedded, normed), dim=1), normed if self.spec.keeps_normed else hidden


def _token_ids(spec: DraftHeadSpec, weights: WeightSource) -> Tensor | None:
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
