"""What execution requires of a model: its shape before the weights are loaded, and a forward pass.

Blueprint is known from config.json alone; ServedModel has the weights. Network and TransformersNetwork implement it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine_worker.kv.layout import Place
from engine_worker.model.devices import Device
from engine_worker.model.model_input import ModelInput
from engine_worker.model.spec import ModelShape
from engine_worker.model.tensor_parallel import TensorParallel
from engine_worker.model.weights import WeightSource


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step can give of any of its tokens. Each call computes the given rows, [M] int64, again.

    Attributes:
        logits: Returns [M, vocab_size], float32.
        hidden: Returns the hidden states after the final norm, [M, hidden_size].
    """

    logits: Callable[[Tensor], Tensor]
    hidden: Callable[[Tensor], Tensor]


class ServedModel(Protocol):
    """A network with its weights and no other state: the KV pool is an argument."""

    @property
    def spec(self) -> ModelShape: ...
    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation; keys and values have that of the KV pool."""

    def attach(self, kv_pool: Tensor, places: Sequence[Place] = (), states: Tensor | None = None) -> Device:
        """Return the device state that forward() takes; see attach_device()."""

    def forward(
        self,
        model_input: ModelInput,
        device: Device,
        look: Callable[[StepOutput], None] | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Run one step: store the KV of all tokens and return the wanted logits.

        Args:
            model_input: Inputs of the step.
            device: From attach().
            look: May request hidden states, and the logits of other rows: piece by piece, because those of a long
                prompt would not fit.
            logits: [N, vocab_size] float32 to write to; default: a new tensor.

        Returns:
            [N, vocab_size], float32, logits of `model_input.logits_indices`.
        """


class Blueprint(Protocol):
    """A model without its weights. Unsupported models are refused when it is made."""

    @property
    def implementation(self) -> str:
        """`native` or `transformers`."""

    @property
    def shape(self) -> ModelShape: ...
    @property
    def weight_format(self) -> str:
        """The name of the linear layers' quantization format, or an empty string."""

    @property
    def weight_kind(self) -> str:
        """`fp8` or `mxfp4`, how linear layers are multiplied, or an empty string."""

    @property
    def refused_options(self) -> dict[str, str]:
        """Worker options that this implementation does not support, with the reason."""

    @property
    def is_capturable(self) -> bool:
        """Whether every forward pass is known to be the same launches, as a CUDA graph needs."""

    def check_tensor_parallel_size(self, size: int) -> None:
        """Check the number of ranks.

        Raises:
            ValueError: With the valid sizes, if `size` is not one.
        """

    def share(self, size: int) -> ModelShape:
        """Return the shape of the largest part of the model, that of rank 0.

        Raises:
            ValueError: As check_tensor_parallel_size().
        """

    def weights_bytes(self, size: int, itemsize: int) -> int:
        """Return the size of that part's weights on a GPU; `itemsize` is that of unquantized elements."""

    def build(
        self,
        weights: WeightSource,
        max_len: int,
        is_deterministic: bool,
        tensor_parallel: TensorParallel | None = None,
    ) -> ServedModel:
        """Load the weights, or this rank's part of them.

        Args:
            weights: The checkpoint. Every tensor must be used.
            max_len: Maximum length of a sequence.
            is_deterministic: Use batch-invariant kernels.
            tensor_parallel: The other ranks; None: there are none.

        Raises:
            ValueError: If a tensor is missing or unused.
        """


def check_options(blueprint: Blueprint, options: dict[str, Any]) -> None:
    """Check the options that are set.

    Raises:
        ValueError: For the first one that the model does not support.
    """
    for name, why in blueprint.refused_options.items():
        if options.get(name):
            raise ValueError(f"--{name.replace('_', '-')}: {why}")
