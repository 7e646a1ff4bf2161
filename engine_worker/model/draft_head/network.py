"""A network beside a draft head, as one ServedModel. The head's keys and values are the last layer of its KV pool."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine_worker.kv.layout import Place
from engine_worker.model.devices import Device
from engine_worker.model.draft_head.head import DraftHead
from engine_worker.model.model_input import ModelInput
from engine_worker.model.network import Network
from engine_worker.model.served_model import StepOutput
from engine_worker.model.spec import ModelSpec


class DraftedNetwork:
    """Runs the target, and keeps the hidden states that the head reads."""

    def __init__(self, network: Network, head: DraftHead, max_tokens: int) -> None:
        """Join both; `max_tokens`: of a step."""
        self._network, self.head = network, head
        self.spec: ModelSpec = network.spec.followed_by(head.layer)
        self.needs_output = head.reads_output
        self._size = network.spec.hidden_size
        width = (len(head.tapped_layers) + head.reads_output) * self._size
        # At one address, because CUDA graphs write to it.
        self._taps = torch.empty(max_tokens, width, dtype=network.dtype, device=network.device)

    @property
    def dtype(self) -> torch.dtype:
        return self._network.dtype

    def attach(self, kv_pool: Tensor, places: Sequence[Place] = (), states: Tensor | None = None) -> Device:
        return self._network.attach(kv_pool, places, states, (self.head.layer,))

    def forward(
        self,
        model_input: ModelInput,
        device: Device,
        look: Callable[[StepOutput], None] | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        return self._network.forward(model_input, device, look, logits, self)

    def taps(self, num_tokens: int) -> Tensor:
        """Return the hidden states of the last step's first tokens, [T, N * H]."""
        return self._taps[:num_tokens]

    def entered(self, layer: int, hidden: Tensor, residual: Tensor) -> None:
        """Keep the input of a layer, if the head reads it."""
        for place, tapped in enumerate(self.head.tapped_layers):
            if tapped == layer:
                columns = slice(place * self._size, (place + 1) * self._size)
                torch.add(self._network.summed(hidden), residual, out=self._taps[: len(hidden), columns])

    def left(self, normed: Tensor) -> None:
        """Keep the output of the last layer."""
        self._taps[: len(normed), -self._size :] = normed
