"""The replicas of a group of ranks, driven as one: rank 0's own, and those of followers by messages.

    ReplicaGroup   on rank 0, with Replica's interface: who drives it does not know how many ranks there are
    follow()       on every other rank: carries the messages out, one after another, until the process is ended

The ranks meet in the collectives of the forward pass; a message says what cannot differ between them. Sampling is rank
0's alone: the others get the sampled ids on their devices, in stream order, as the input of the step after.

In every step of a group, between the model runner and the devices. It knows no process and no scheduler.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine_worker.execution.cuda_graphs import GraphKey
from engine_worker.execution.group_messages import MoveBlocks, RunStep, encode, work_of
from engine_worker.execution.kv_cache import KVCache
from engine_worker.execution.replica import PreparedStep, Replica
from engine_worker.execution.step_channel import MessageReceiver, MessageSender
from engine_worker.execution.step_description import StepDescription
from engine_worker.model.served_model import LogitsOf
from engine_worker.model.spec import ModelShape
from engine_worker.model.tensor_parallel import TensorParallel
from engine_worker.scheduling.batch import Transfers, TransferTime


class ReplicaGroup:
    def __init__(
        self, replica: Replica, tensor_parallel: TensorParallel, channel: MessageSender, blame: Callable[[], None]
    ) -> None:
        """`replica`: that of rank 0; `blame`: called when a collective fails, before its error is raised."""
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
        """Rank 0's part: those of all ranks have the same blocks, each with its own heads."""
        return self._replica.kv_cache

    def move_blocks(self, transfers: Transfers) -> None:
        self._channel.send(encode(MoveBlocks(transfers)))
        self._replica.move_blocks(transfers)

    def finished_transfers(self) -> list[TransferTime]:
        return self._replica.finished_transfers()

    def prepare(self, description: StepDescription, looks: Sequence[range] = ()) -> PreparedStep:
        """Tell the followers of a step, then begin it here. keep_samples() must follow if it has logits."""
        graph = self._replica.graph_for(description, looks)
        message = RunStep(
            description=description.to_bytes(),
            graph=(graph.size, graph.mixed) if graph is not None else None,
            looks=[(rows.start, rows.stop) for rows in looks],
            num_samples=description.num_logits,
        )
        self._channel.send(encode(message))
        return self._replica.begin(description, graph)

    def run(self, prepared: PreparedStep, look: Callable[[LogitsOf], None] | None = None) -> Tensor:
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
    """Carry out what rank 0 says, for ever. Raises ChannelCorrupted before a message that is not whole is carried out.

    `device`: of the replica. Never returns otherwise: rank 0's end is this process's.
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
    replica.finished_transfers()  # rank 0 tells of its own


def _run_step(message: RunStep, replica: Replica, tensor_parallel: TensorParallel, device: torch.device) -> None:
    prepared = replica.begin(message.step, GraphKey(*message.graph) if message.graph is not None else None)

    def look(logits_of: LogitsOf) -> None:
        for start, stop in message.looks:
            logits_of(torch.arange(start, stop, device=device))

    replica.run(prepared, look if message.looks else None)
    if message.num_samples:
        token_ids = torch.empty(message.num_samples, dtype=torch.int64, device=device)
        replica.keep_samples(tensor_parallel.broadcast(token_ids))
