"""The demands of execution on a network, whoever wrote it: its shape before the weights are there, and a forward pass.

    Blueprint     a model that can be served, known by its config.json alone
    ServedModel   the same with its weights; Network and TransformersNetwork are the two there are

Knows no tensors' names, no files and no devices. It is used in every step: replica.py calls the forward pass through
it.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from engine_worker.model.devices import Device
from engine_worker.model.model_input import ModelInput
from engine_worker.model.spec import ModelShape
from engine_worker.model.tensor_parallel import TensorParallel
from engine_worker.model.weights import WeightSource

LogitsOf: TypeAlias = Callable[[Tensor], Tensor]  # rows [M] int64 of the step's tokens -> [M, vocab_size]


class ServedModel(Protocol):
    """A network with its weights. It has no other state: the KV pool is an argument."""

    @property
    def spec(self) -> ModelShape: ...
    @property
    def dtype(self) -> torch.dtype:
        """The type that it computes in. Its keys and values are stored in that of the KV pool."""

    def attach(self, kv_pool: Tensor) -> Device:
        """Views of `kv_pool` [num_blocks, L, 2, Hkv, BS, D] as forward() wants them."""

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


class Blueprint(Protocol):
    """A model without its weights. Whatever it cannot serve was refused when it was made."""

    @property
    def implementation(self) -> str:
        """`native` or `transformers`."""

    @property
    def shape(self) -> ModelShape: ...
    @property
    def weight_format(self) -> str:
        """The name of the format in which products' weights are quantized; empty where they are not."""

    @property
    def refused_options(self) -> dict[str, str]:
        """Options of a worker that this way of running cannot keep -> why."""

    @property
    def is_capturable(self) -> bool:
        """Whether its forward pass is known to be the same launches every time, as a CUDA graph needs."""

    def check_tensor_parallel_size(self, size: int) -> None:
        """Raises ValueError with the numbers of ranks that can share the model, if `size` is none of them."""

    def share(self, size: int) -> ModelShape:
        """The shape of the largest part of the model, rank 0's of `size`. Raises ValueError as above."""

    def weights_bytes(self, size: int, itemsize: int) -> int:
        """The size of the weights of that part on a GPU; `itemsize`: bytes of an element that is not quantized."""

    def build(
        self,
        weights: WeightSource,
        max_len: int,
        is_deterministic: bool,
        tensor_parallel: TensorParallel | None = None,
    ) -> ServedModel:
        """Takes every tensor from `weights`, or this rank's part of it; raises ValueError with the name of one that is
        missing or left over. `tensor_parallel`: the other ranks; None where there are none.
        """


def check_options(blueprint: Blueprint, options: dict[str, Any]) -> None:
    """`options`: those that are set, by name. Raises ValueError with the first one that cannot be kept."""
    for name, why in blueprint.refused_options.items():
        if options.get(name):
            raise ValueError(f"--{name.replace('_', '-')}: {why}")
