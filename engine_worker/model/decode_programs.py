"""Record a CPU decode step's kernels once per number of rows, and run them as one program.

At one row, a step's operators are shorter than waking a thread for each of them and than the Python around them. Like
CUDA graphs (execution/step/cuda_graphs.py), but for the exact number of rows, recorded on first use.
"""

import logging
from dataclasses import replace

import torch
from torch import Tensor

from engine_worker.model.compiled_step import CompiledDevice
from engine_worker.model.devices import Device
from engine_worker.model.model_input import ModelInput
from engine_worker.model.network import Network
from engine_worker.model.served_model import ServedModel
from kernels.cpu.library import cpu_library
from kernels.cpu.program import Buffers, NotRecordable, recording

logger = logging.getLogger("worker")

# With more rows, kernels take long enough to be called one by one.
MAX_ROWS = 32


def decode_programs(model: ServedModel, device: Device) -> "DecodePrograms | None":
    """Return the recorder for this model and device, or None if nothing can be recorded."""
    if isinstance(model, Network) and model.is_whole and isinstance(device, CompiledDevice):
        return DecodePrograms(model, device)
    return None


class DecodePrograms:
    def __init__(self, network: Network, device: CompiledDevice) -> None:
        self._network, self._device = network, device
        self._by_rows: dict[int, _DecodeProgram] = {}
        self._buffers = Buffers()
        self._logits: Tensor | None = None  # [MAX_ROWS, V], shared by all programs
        self._is_recordable = True

    def logits_of(self, model_input: ModelInput) -> Tensor | None:
        """Return logits [T, V] float32, overwritten by the next call; None unless each sequence has one token."""
        num_rows = len(model_input.token_ids)
        if not self._is_recordable or num_rows > MAX_ROWS or (ordered := _in_order_of_logits(model_input)) is None:
            return None
        model_input = ordered
        if num_rows not in self._by_rows:
            try:
                self._by_rows[num_rows] = self._recorded(model_input)
            except NotRecordable as error:
                self._is_recordable = False
                logger.info("decode steps: not recorded, run kernel by kernel: %s", error)
                return None
        return self._by_rows[num_rows].run(model_input)

    def _recorded(self, model_input: ModelInput) -> "_DecodeProgram":
        if self._logits is None:
            self._logits = torch.empty(MAX_ROWS, self._network.spec.vocab_size)
        return _DecodeProgram(self._network, self._device, model_input, self._buffers, self._logits)


class _DecodeProgram:
    def __init__(
        self, network: Network, device: CompiledDevice, model_input: ModelInput, buffers: Buffers, logits: Tensor
    ) -> None:
        """Record one step.

        Raises:
            NotRecordable: If the network calls a torch operator.
        """
        num_rows = len(model_input.token_ids)
        size, dtype = (num_rows, network.spec.hidden_size), network.dtype
        self._network, self._logits = network, logits[:num_rows]
        self._hidden, self._residual = buffers.take(size, dtype), buffers.take(size, dtype)
        self._step = device.begin_program(model_input)
        with recording(cpu_library(), buffers) as recorded:
            hidden, residual = network.through_layers(self._step, self._hidden, self._residual)
            network.multiplied_by_head(self._step, hidden, residual, self._logits)
        self._program = recorded.program

    def run(self, model_input: ModelInput) -> Tensor:
        self._step.follow(model_input)
        self._hidden.zero_()
        self._residual.copy_(self._network.embed(model_input.token_ids))
        self._program.run()
        return self._network.scaled_logits(self._logits)


def _in_order_of_logits(model_input: ModelInput) -> ModelInput | None:
    """Return the step with its rows in the order of the wanted logits, which a program writes in row order.

    Return None unless every sequence has one token whose logits are wanted once, and no state knows drafts.
    """
    wanted = model_input.logits_indices
    if model_input.drafted_rows is not None or model_input.max_query_len != 1:
        return None
    if not len(model_input.seq_lens) == len(model_input.token_ids) == len(wanted):
        return None
    order, rows = wanted.tolist(), list(range(len(wanted)))
    if order == rows:
        return model_input
    if sorted(order) != rows:
        return None
    return replace(
        model_input,
        token_ids=model_input.token_ids[wanted],
        positions=model_input.positions[wanted],
        slot_mapping=model_input.slot_mapping[:, wanted],
        seq_lens=model_input.seq_lens[wanted],
        block_tables=model_input.block_tables[:, wanted],
        logits_indices=torch.arange(len(rows)),
        state_blocks=None if model_input.state_blocks is None else model_input.state_blocks[wanted],
    )
