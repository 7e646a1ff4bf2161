"""What a draft head is: it continues the target's hidden states of a step by some tokens, over the target's KV pool.

Position p has the target's hidden state of position p and the embedding of the token after it. So the first draft of a
step runs over the rows of the target's step, and further ones feed the head its own output.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from engine_worker.model.devices import DeviceStep
from engine_worker.model.draft_head.eagle3 import Eagle3Head
from engine_worker.model.draft_head.eagle3_spec import Eagle3Spec
from engine_worker.model.draft_head.mtp import MtpHead
from engine_worker.model.draft_head.read import DraftHeadSpec
from engine_worker.model.network import Network
from engine_worker.model.spec import LayerSpec, MtpSpec
from engine_worker.model.tensor_parallel import SINGLE, TensorParallel
from engine_worker.model.weights import WeightSource


class DraftHead(Protocol):
    """Its keys and values are the last layer of the KV pool."""

    layer: LayerSpec
    tapped_layers: tuple[int, ...]  # the target's layers whose inputs it reads
    reads_output: bool  # it reads the normed output of the last layer

    def combine(self, taps: Tensor) -> Tensor:
        """Return the hidden states [T, H] of what it reads of the target, [T, N * H]."""

    def store(self, step: DeviceStep, token_ids: Tensor, hidden: Tensor) -> None:
        """Store the keys and values of all rows, and compute nothing else; arguments as below."""

    def __call__(
        self, step: DeviceStep, token_ids: Tensor, hidden: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of all rows, and return the drafts that follow `rows`, or all.

        Args:
            step: Operators of this pass.
            token_ids: [T] int64, the token after each row's position.
            hidden: [T, H], of combine() or of the pass before.
            rows: [N] int64; each ends a sequence.

        Returns:
            Token ids [N] int64, and the hidden states [N, H] for the next pass.
        """


_LOADERS: Mapping[type[DraftHeadSpec], Callable[[Any, Network, WeightSource, int, TensorParallel], DraftHead]] = {
    Eagle3Spec: Eagle3Head,
    MtpSpec: MtpHead,
}


def load_draft_head(
    spec: DraftHeadSpec, network: Network, weights: WeightSource, max_len: int, ranks: TensorParallel = SINGLE
) -> DraftHead:
    """Load a head.

    Args:
        spec: The head.
        network: Its target.
        weights: The tensors of the head; all are used.
        max_len: Positions of the rotary table.
        ranks: The ranks that share target and head.

    Raises:
        ValueError: If a tensor is missing, unused or has another shape.
    """
    return _LOADERS[type(spec)](spec, network, weights, max_len, ranks)
