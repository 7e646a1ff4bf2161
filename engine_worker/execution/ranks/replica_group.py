"""The replicas of a group of ranks, driven as one: rank 0's own directly, those of followers by messages.

    ReplicaGroup   on rank 0, with the interface of Replica
    GroupDrafts    on rank 0, with the interface of DraftMaker
    Follower       on the other ranks: carries out messages in order until the process ends

The ranks meet in the collectives of the forward pass, and every decision is in the message. Only rank 0 samples; the
others receive the sampled ids on their devices, in stream order, as the next step's input.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine_worker.execution.ranks.group_messages import MakeDrafts, MoveBlocks, RunStep, Work, encode, work_of
from engine_worker.execution.ranks.step_channel import MessageReceiver, MessageSender
from engine_worker.execution.sampling.sampling_pieces import to_device
from engine_worker.execution.step.cuda_graphs import GraphKey
from engine_worker.execution.step.draft_description import DraftDescription
from engine_worker.execution.step.draft_maker import DraftMaker
from engine_worker.execution.step.kv_cache import KVCache
from engine_worker.execution.step.replica import PreparedStep, Replica
from engine_worker.execution.step.step_description import StepDescription
from engine_worker.kv.transfers import Transfers, TransferTime
from engine_worker.model.model_input import ModelInput
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


class GroupDrafts:
    """Makes drafts on all ranks. Implements DraftMaker."""

    def __init__(self, maker: DraftMaker, channel: MessageSender, blame: Callable[[], None]) -> None:
        """Drive `maker`, that of rank 0, and those of the followers. The other arguments are those of ReplicaGroup."""
        self._maker, self._channel, self._blame = maker, channel, blame
        self.lookahead, self.follows_all_steps = maker.lookahead, maker.follows_all_steps

    def launch(
        self, model_input: ModelInput, key: GraphKey | None, sampled: Tensor, description: DraftDescription, number: int
    ) -> Tensor | None:
        """Send the work after a step to the followers, then enqueue it here; see DraftMaker."""
        self._channel.send(encode(MakeDrafts.of(description, number)))
        try:
            return self._maker.launch(model_input, key, sampled, description, number)
        except RuntimeError:
            self._blame()
            raise


class Follower:
    """Carries out rank 0's messages on another rank."""

    def __init__(
        self, replica: Replica, tensor_parallel: TensorParallel, device: torch.device, maker: DraftMaker | None = None
    ) -> None:
        """Hold this rank's replica, the ranks, the replica's device, and what makes drafts."""
        self._replica, self._tensor_parallel, self._device, self._maker = replica, tensor_parallel, device, maker
        self._last: tuple[PreparedStep, Tensor] | None = None  # the last step, and its samples

    def follow(self, channel: MessageReceiver) -> None:
        """Carry out the messages of `channel` forever. The process ends with rank 0.

        Raises:
            ChannelCorrupted: If a message is damaged; it is not carried out.
        """
        while True:
            self.carry_out(work_of(channel.receive()))

    @torch.inference_mode()
    def carry_out(self, message: Work) -> None:
        if isinstance(message, MoveBlocks):
            self._replica.move_blocks(message.transfers)
        elif isinstance(message, MakeDrafts):
            self._make_drafts(message)
        else:
            self._run_step(message)
        self._replica.finished_transfers()  # drops them: rank 0 reports its own

    def _run_step(self, message: RunStep) -> None:
        device, replica = self._device, self._replica
        prepared = replica.begin(message.step, GraphKey(*message.graph) if message.graph is not None else None)

        def look(output: StepOutput) -> None:
            for start, stop in message.looks:
                output.logits(torch.arange(start, stop, device=device))
            if message.pooled:
                output.hidden(to_device(np.array(message.pooled), device))

        replica.run(prepared, look if message.looks or message.pooled else None)
        token_ids = torch.empty(message.num_samples, dtype=torch.int64, device=device)
        if message.num_samples:
            token_ids = self._tensor_parallel.broadcast(token_ids)
            replica.keep_samples(token_ids)
        self._last = prepared, token_ids

    def _make_drafts(self, message: MakeDrafts) -> None:
        assert self._maker is not None and self._last is not None, "all ranks load the same, and a step came before"
        prepared, token_ids = self._last
        self._maker.launch(prepared.model_input, prepared.graph, token_ids, message.description, message.number)
