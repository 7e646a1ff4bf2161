"""The parts of a decoder-only network as frozen values, made by a family's file and used to build or size a network.

    ModelSpec -> one LayerSpec per layer -> a mixer (specs/attention.py, specs/short_conv.py, specs/gated_delta.py,
    specs/state_space.py) and an MLP (specs/mlp.py, specs/experts.py)

A feature that a network lacks is a neutral value (no norm, a factor of 1), never a branch over families. NamesSpec has
the names of the checkpoint's tensors.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, Self, TypeAlias

from engine_worker.kv.layout import MAX_GROUPS, KVGroup, KVLayout, group_layers
from engine_worker.model.specs.attention import AttentionSpec
from engine_worker.model.specs.experts import ExpertsSpec
from engine_worker.model.specs.gated_delta import GatedDeltaSpec
from engine_worker.model.specs.mlp import MlpSpec
from engine_worker.model.specs.names import MtpNames, NamesSpec
from engine_worker.model.specs.part import Part, PartSpec, TensorSpec
from engine_worker.model.specs.short_conv import ShortConvSpec
from engine_worker.model.specs.state_space import StateSpaceSpec
from engine_worker.model.weight_format import DENSE, WeightFormat

RecurrentSpec: TypeAlias = GatedDeltaSpec | StateSpaceSpec


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A mixer, an MLP, or both, with norms before a part (on its input), after it (on what it adds), or both."""

    mixer: AttentionSpec | ShortConvSpec | RecurrentSpec | None
    mlp: MlpSpec | ExpertsSpec | None
    norms_before: bool = True
    norms_after: bool = False
    residual_scale: float = 1.0  # factor of what a part adds

    def with_attention(self, **changes: Any) -> Self:
        """Return a layer that attends with changed fields of its AttentionSpec."""
        assert isinstance(self.mixer, AttentionSpec), "only attention can be changed"
        return replace(self, mixer=replace(self.mixer, **changes))

    def tensors(self, names: NamesSpec, hidden: int) -> Iterator[TensorSpec]:
        """Yield all tensors of the layer; names are relative to its prefix."""
        for norm_before, norm_after, part in (
            (names.before_attention, names.after_attention, self.mixer),
            (names.before_mlp, names.after_mlp, self.mlp),
        ):
            if part is None:
                continue
            if self.norms_before:
                yield TensorSpec(f"{norm_before}.weight", (hidden,))
            yield from part.tensors(names, hidden)
            if self.norms_after:
                yield TensorSpec(f"{norm_after}.weight", (hidden,))

    def share(self, rank: int, size: int) -> Self:
        """Return the layer of one of `size` ranks."""
        return replace(
            self, mixer=self.mixer and self.mixer.share(rank, size), mlp=self.mlp and self.mlp.share(rank, size)
        )

    def parts(self, names: NamesSpec, hidden: int, rank: int, size: int) -> Iterator[tuple[str, Part]]:
        """Yield a rank's part of each tensor; tensors that are not listed are replicated."""
        for part in self._parts:
            yield from part.parts(names, hidden, rank, size)

    def fits(self, size: int) -> bool:
        """Return whether `size` ranks can share the layer."""
        return all(part.fits(size) for part in self._parts)

    @property
    def sizes(self) -> str:
        """The numbers that ranks divide, for messages."""
        return ", ".join(part.sizes for part in self._parts)

    @property
    def _parts(self) -> list[PartSpec]:
        return [part for part in (self.mixer, self.mlp) if part is not None]


@dataclass(frozen=True, kw_only=True)
class MtpSpec:
    """A layer for multi-token prediction (MTP) in the network's checkpoint. It predicts the token after the next one.

    It has the embedding and the head of the network; see draft_head/mtp.py.
    """

    layer: LayerSpec
    names: MtpNames  # around the layer
    layer_names: NamesSpec  # in it; its experts may be stored in another form than those of the network

    @property
    def prefix(self) -> str:
        """The prefix of its tensors in the files."""
        return self.names.prefix

    def num_parameters(self, hidden: int) -> int:
        """Return the parameters beside those of the network, whose hidden size is `hidden`."""
        tensors = self.layer.tensors(self.layer_names, hidden)
        return sum(math.prod(tensor.shape) for tensor in tensors) + 2 * hidden * hidden + 3 * hidden


class CacheLayer(Protocol):
    """What a layer of the KV pool belongs to."""

    @property
    def window(self) -> int:
        """Tokens visible to a token, including itself; 0: all before it."""


class ModelShape(Protocol):
    """What is known of any network before its weights are loaded."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that attends."""

    @property
    def cache_layers(self) -> tuple[CacheLayer, ...]:
        """The layers of the KV pool: one per attention, and one or more per short convolution."""

    @property
    def cache_owners(self) -> tuple[int, ...]:
        """The model's layer that each of them belongs to."""

    @property
    def state_shape(self) -> tuple[int, int]:
        """The recurrent layers, and the float32 elements of the state of each; (0, 0): there are none."""

    @property
    def draft_values(self) -> int:
        """The most float32 elements that a recurrent layer keeps of each token of a step with drafts."""

    def num_parameters(self) -> int: ...


def has_convolutions(shape: ModelShape) -> bool:
    """Return whether short convolutions keep inputs in the KV pool."""
    return len(shape.cache_layers) > len(shape.attentions)


def kv_layout(
    shape: ModelShape, block_size: int, dtype: str, max_groups: int = MAX_GROUPS, num_drafts: int = 0
) -> KVLayout:
    """Return the KV layout.

    Args:
        shape: The model; all layers have the same KV shape.
        block_size: Tokens per block.
        dtype: A key of ITEMSIZES.
        max_groups: Upper bound of the groups; 1: all layers free their blocks together, by the widest window.
        num_drafts: The most drafts of a sequence and step, whose inputs are kept beside recurrent states.
    """
    divided = group_layers([layer.window for layer in shape.cache_layers], max_groups)
    num_places = max(len(layers) for _, layers in divided)
    groups = tuple(
        KVGroup(
            layers=layers,
            num_places=num_places,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            window=window,
        )
        for window, layers in divided
    )
    num_states, values = shape.state_shape
    values += (1 + num_drafts) * shape.draft_values if num_drafts else 0
    return KVLayout(groups=groups, block_size=block_size, state_shape=(num_states, values))


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only network."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    norm_offset: float = 0.0  # added to all norm weights, which some checkpoints store around 0
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str  # dtype of the checkpoint: bfloat16, float16 or float32
    eos_token_ids: tuple[int, ...]
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False  # round the factor to the model's dtype
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # logits become softcap * tanh(logit / softcap); 0: unchanged
    quantization: WeightFormat = DENSE
    names: NamesSpec = field(default_factory=NamesSpec)
    mtp: MtpSpec | None = None  # loaded for --speculative-config only
    unused: tuple[str, ...] = ()  # patterns of tensors that a checkpoint may have and the network does not read
    head_rows: tuple[int, int] | None = None  # [start, end) of the tokens whose logits a rank computes

    def with_names_of(self, stored: Iterable[str]) -> Self:
        """Return the network with the names that the `stored` tensors use, where a family has two forms."""
        experts = self.names.experts.as_stored(stored)
        return replace(self, names=replace(self.names, experts=experts))

    def followed_by(self, layer: LayerSpec) -> Self:
        """Return the shape of the network and a draft head, whose keys and values are the last layer of the KV pool."""
        return replace(self, layers=(*self.layers, layer))

    # All attentions have the same KV shape.
    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return self._attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self._attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self._attention.head_dim

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def cache_layers(self) -> tuple[CacheLayer, ...]:
        mixers = (self.layers[index].mixer for index in self.cache_owners)
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec | ShortConvSpec))

    @property
    def cache_owners(self) -> tuple[int, ...]:
        return tuple(index for index, number in enumerate(self.num_cache_layers) for _ in range(number))

    @property
    def num_cache_layers(self) -> tuple[int, ...]:
        """The layers of the KV pool that each layer has."""
        size = 2 * self._attention.kv_size
        return tuple(layer.mixer.num_cache_layers(size) if layer.mixer else 0 for layer in self.layers)

    @property
    def num_states_before(self) -> tuple[int, ...]:
        """The recurrent layers before each layer."""
        are_recurrent = (isinstance(layer.mixer, RecurrentSpec) for layer in self.layers)
        return tuple(accumulate(are_recurrent, initial=0))[:-1]

    @property
    def state_shape(self) -> tuple[int, int]:
        sizes = [layer.mixer.state_values for layer in self.layers if isinstance(layer.mixer, RecurrentSpec)]
        return len(sizes), max(sizes, default=0)

    @property
    def draft_values(self) -> int:
        recurrent = (layer.mixer for layer in self.layers if isinstance(layer.mixer, RecurrentSpec))
        return max((mixer.draft_values for mixer in recurrent), default=0)

    @cached_property
    def _attention(self) -> AttentionSpec:
        """The first attention. A step reads its sizes."""
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    def num_parameters(self) -> int:
        first, end = self.head_rows or (0, self.vocab_size)
        embeddings = self.hidden_size * (self.vocab_size + (0 if self.tie_word_embeddings else end - first))
        tensors = (tensor for layer in self.layers for tensor in layer.tensors(self.names, self.hidden_size))
        return embeddings + self.hidden_size + sum(math.prod(tensor.shape) for tensor in tensors)
