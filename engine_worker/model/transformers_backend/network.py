"""A causal model of transformers as a ServedModel, with this engine's attention, KV pool and weights.

All sequences of a step are one packed row of tokens with positions. Everything but attention works on single tokens,
and attention knows the sequence of each. Logits have the precision of the library's head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_worker.kv.layout import Place
from engine_worker.model.architectures.config_keys import token_ids
from engine_worker.model.devices import Device, attach_device
from engine_worker.model.model_input import ModelInput
from engine_worker.model.served_model import StepOutput
from engine_worker.model.sharding import check_one_rank
from engine_worker.model.specs.attention import AttentionSpec
from engine_worker.model.tensor_parallel import TensorParallel
from engine_worker.model.transformers_backend.attention import CurrentStep, LayerAttention
from engine_worker.model.transformers_backend.library import skeleton
from engine_worker.model.transformers_backend.parameters import load_parameters, num_parameters
from engine_worker.model.transformers_backend.probe import Probed, probe
from engine_worker.model.transformers_backend.split import split_head
from engine_worker.model.weights import WeightSource
from kernels.attention.score_rules import ScoreRules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class ProbedShape:
    """A ModelShape determined by running the model without weights."""

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    attentions: tuple[AttentionSpec, ...]
    parameters: int

    @property
    def cache_layers(self) -> tuple[AttentionSpec, ...]:
        return self.attentions

    @property
    def cache_owners(self) -> tuple[int, ...]:
        return tuple(range(self.num_layers))

    @property
    def state_shape(self) -> tuple[int, int]:
        return 0, 0

    @property
    def draft_values(self) -> int:
        return 0

    def num_parameters(self) -> int:
        return self.parameters


@dataclass(frozen=True)
class TransformersBlueprint:
    """A model that runs through transformers."""

    shape: ProbedShape
    model: "PreTrainedModel"  # on the meta device
    probed: Probed
    implementation: str = "transformers"
    is_capturable: bool = False  # some models read values on the host
    weight_format: str = ""
    weight_kind: str = ""
    refused_options: dict[str, str] = field(
        default_factory=lambda: {
            "deterministic": "transformers' operators may give other bits in other batches; "
            "only natively implemented models support it"
        }
    )

    @classmethod
    def of(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> "TransformersBlueprint":
        """Probe a model.

        Raises:
            ModelNotServed: With the reason.
        """
        model = skeleton(config)
        probed = probe(model)
        known = model.config.get_text_config()
        shape = ProbedShape(
            vocab_size=probed.vocab_size,
            num_layers=len(probed.modules),
            num_heads=probed.num_heads,
            num_kv_heads=probed.num_kv_heads,
            head_dim=probed.head_dim,
            max_position_embeddings=known.max_position_embeddings,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            eos_token_ids=token_ids(generation.get("eos_token_id", known.eos_token_id)),
            attentions=probed.attentions,
            parameters=num_parameters(model),
        )
        return cls(shape, model, probed)

    def check_tensor_parallel_size(self, size: int) -> None:
        check_one_rank(size)

    def share(self, size: int) -> ProbedShape:
        check_one_rank(size)
        return self.shape

    def weights_bytes(self, size: int, itemsize: int) -> int:
        return self.share(size).num_parameters() * itemsize

    def build(
        self,
        weights: WeightSource,
        max_len: int,
        is_deterministic: bool,
        tensor_parallel: TensorParallel | None = None,
    ) -> "TransformersNetwork":
        check_one_rank(tensor_parallel.size if tensor_parallel is not None else 1)
        load_parameters(self.model, weights)
        weights.check_all_used(self.model._keys_to_ignore_on_load_unexpected or ())
        return TransformersNetwork(self.shape, self.model, self.probed)


class TransformersNetwork:
    """A transformers model with its weights."""

    def __init__(self, shape: ProbedShape, model: "PreTrainedModel", probed: Probed) -> None:
        self.spec = shape
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self._step = CurrentStep()
        for layer, (module, attention) in enumerate(zip(probed.modules, probed.attentions, strict=True)):
            rules = ScoreRules(attention.window, attention.softcap)
            module.paged_attention = LayerAttention(self._step, layer, self.dtype, rules)
        self._decoder, self._head = split_head(model)

    def attach(self, kv_pool: Tensor, places: Sequence[Place] = (), states: Tensor | None = None) -> Device:
        return attach_device(self.spec, kv_pool, self.dtype, places=places)

    @torch.inference_mode()
    def forward(
        self,
        model_input: ModelInput,
        device: Device,
        look: Callable[[StepOutput], None] | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Compute logits; see ServedModel."""
        self._step.operators = device.begin_step(model_input)
        token_ids, positions = model_input.token_ids[None], model_input.positions[None]
        try:
            hidden = self._decoder(input_ids=token_ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        finally:
            self._step.operators = None
        if look is not None:
            look(StepOutput(logits=lambda rows: self._logits_of(hidden[rows]), hidden=lambda rows: hidden[rows]))
        found = self._logits_of(hidden[model_input.logits_indices])
        return found if logits is None else logits.copy_(found)

    def _logits_of(self, hidden: Tensor) -> Tensor:
        return self._head(hidden[None])[0].float()
