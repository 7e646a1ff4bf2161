"""The replicas of a group of ranks, driven as one: rank 0's own directly, those of followers by messages.

    ReplicaGroup   on rank 0, with the interface of Replica
    follow()       on the other ranks: carries out messages in order until the process ends

The ranks meet in the collectives of the forward pass, and every decision is in the message. Only rank 0 samples; the
others receive the sampled ids on their devices, in stream order, as the next step's input.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine_worker.execution.ranks.group_messages import MoveBlocks, RunStep, encode, work_of
from engine_worker.execution.ranks.step_channel import MessageReceiver, MessageSender
from engine_worker.execution.sampling.sampling_pieces import to_device
from engine_worker.execution.step.cuda_graphs import GraphKey
from engine_worker.execution.step.kv_cache import KVCache
from engine_worker.execution.step.replica import PreparedStep, Replica
from engine_worker.execution.step.step_description import StepDescription
from engine_worker.kv.transfers import Transfers, TransferTime
from engine_worker.model.served_model import StepOutput
from engine_worker.model.spec import ModelShape
from engine_worker.model.tensor_parallel import TensorParallel


class ReplicaGroup:
    def __init__(
        self, replica: Replica, tensor_parallel: TensorParallel, channel: MessageSender, blame: Callable[[], None]
    ) -> None:
        """Drive a group.

        Args:
            replica: The replica of rank 0.
            tensor_parallel: The ranks.
            channel: Sends messages to the followers.
            blame: Called when a collective fails, before its error is raised.
        """
        self._blame = blame
        self._replica = replica
        self._tensor_parallel = tensor_parallel
        self._channel = channel

    @property
    def model_spec(self) -> ModelShape:
        return self._replica.model_spec

    @property
    def dtype_name(self) -> str:
        return self._replica.dtype_name

    @property
    def device_type(self) -> str:
        return self._replica.device_type

    @property
    def max_model_len(self) -> int:
        return self._replica.max_model_len

    @property
    def kv_cache(self) -> KVCache:
        """Return rank 0's part. All ranks have the same blocks, each with its own heads."""
        return self._replica.kv_cache

    def move_blocks(self, transfers: Transfers) -> None:
        self._channel.send(encode(MoveBlocks(transfers)))
        self._replica.move_blocks(transfers)

    def finished_transfers(self) -> list[TransferTime]:
        return self._replica.finished_transfers()

    def prepare(
        self, description: StepDescription, looks: Sequence[range] = (), pooled: Sequence[int] = ()
    ) -> PreparedStep:
        """Send a step to the followers, then begin it here. keep_samples() must follow if it has logits."""
        graph = self._replica.graph_for(description, has_looks=bool(looks or pooled))
        message = RunStep(
            description=description.to_bytes(),
            graph=(graph.size, graph.mixed) if graph is not None else None,
            looks=[(rows.start, rows.stop) for rows in looks],
            num_samples=description.num_logits,
            pooled=pooled,
        )
        self._channel.send(encode(message))
        return self._replica.begin(description, graph)

    def run(self, prepared: PreparedStep, look: Callable[[StepOutput], None] | None = None) -> Tensor:
        try:
            return self._replica.run(prepared, look)
        except RuntimeError:
            self._blame()
            raise

    def keep_samples(self, token_ids: Tensor) -> None:
        try:
            self._replica.keep_samples(self._tensor_parallel.broadcast(token_ids))
        except RuntimeError:
            self._blame()
            raise


def follow(replica: Replica, tensor_parallel: TensorParallel, channel: MessageReceiver, device: torch.device) -> None:
    """Carry out rank 0's messages forever. The process ends with rank 0.

    Args:
        replica: This rank's replica.
        tensor_parallel: The ranks.
        channel: Receives messages of rank 0.
        device: Device of the replica.

    Raises:
        ChannelCorrupted: If a message is damaged; it is not carried out.
    """
    while True:
        carry_out(work_of(channel.receive()), replica, tensor_parallel, device)


@torch.inference_mode()
def carry_out(
    message: MoveBlocks | RunStep, replica: Replica, tensor_parallel: TensorParallel, device: torch.device
) -> None:
    if isinstance(message, MoveBlocks):
        replica.move_blocks(message.transfers)
    else:
        _run_step(message, replica, tensor_parallel, device)
    replica.finished_transfers()  # drops them: rank 0 reports its own


def _run_step(message: RunStep, replica: Replica, tensor_parallel: TensorParallel, device: torch.device) -> None:
    prepared = replica.begin(message.step, GraphKey(*message.graph) if message.graph is not None else None)

    def look(output: StepOutput) -> None:
        for start, stop in message.looks:
            output.logits(torch.arange(start, stop, device=device))
        if message.pooled:
            output.hidden(to_device(np.array(message.pooled), device))

    replica.run(prepared, look if message.looks or message.pooled else None)
    if message.num_samples:
        token_ids = torch.empty(message.num_samples, dtype=torch.int64, device=device)
        replica.keep_samples(tensor_parallel.broadcast(token_ids))
