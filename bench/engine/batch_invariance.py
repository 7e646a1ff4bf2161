"""Whether a sequence's bits depend on its batch, through a whole network of Llama-3.1-8B's layers on one GPU.

    python -m bench batch-invariance --out DIR [--deterministic] [--num-layers 32]

Compares logits bit by bit: a sequence that decodes alone, among others and among 256; a prompt in one piece and in
chunks; a token decoded and the same token as the end of a prompt. Then times decode steps (as CUDA graphs) and a
prefill, so that two runs give the cost of --deterministic. Writes DIR/batch_invariance.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kernel.graph_time import graph_microseconds
from engine_worker.execution.load_replica import use_batch_invariant_products
from engine_worker.model.architectures import spec_from_json
from engine_worker.model.model_input import ModelInput
from engine_worker.model.network import Network
from engine_worker.model.spec import ModelSpec
from engine_worker.model.weights import RandomWeights

BLOCK_SIZE, MAX_LEN, NUM_SEQUENCES = 16, 8192, 256
NUM_BLOCKS = 1 + NUM_SEQUENCES * 66
PROMPT = 700
# The cuts of a prompt: one leaves a single token, which another attention kernel serves by default.
CHUNKS = (33, 35, 300, 301, 698, 700)
BATCHES = (1, 2, 7, 16, 17, 33, 64, 65, 100, 128, 200)


def llama_8b(num_layers: int) -> ModelSpec:
    shape = {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": num_layers, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": MAX_LEN, "rope_theta": 500000.0, "dtype": "bfloat16",
    }  # fmt: skip
    return spec_from_json(shape, {"eos_token_id": 2})


class Bench:
    """The model, a KV pool, and a table of blocks for each of NUM_SEQUENCES sequences of random tokens."""

    def __init__(self, num_layers: int, is_deterministic: bool = False) -> None:
        self.device = torch.device("cuda")
        config = llama_8b(num_layers)
        weights = RandomWeights(self.device, torch.bfloat16)
        self.model = Network(config, weights, MAX_LEN, is_deterministic)
        shape = (NUM_BLOCKS, num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self.pool = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        self.kv = self.model.attach(self.pool)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(config.vocab_size, (NUM_SEQUENCES, MAX_LEN), generator=generator)
        self.tables = 1 + torch.randperm(NUM_BLOCKS - 1, generator=generator).view(NUM_SEQUENCES, -1)

    def model_input(self, pieces: list[tuple[int, int, int]]) -> ModelInput:
        """The input of pieces (sequence, first token, end); it wants the logits of every piece's last token."""
        sequences = torch.tensor([sequence for sequence, _, _ in pieces])
        lens = torch.tensor([end - start for _, start, end in pieces])
        ends = torch.tensor([end for _, _, end in pieces])
        starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        positions = torch.cat([torch.arange(start, end) for _, start, end in pieces])
        owners = sequences.repeat_interleave(lens)
        slots = self.tables[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

        def on_device(values: Tensor, dtype: torch.dtype) -> Tensor:
            return values.to(self.device, dtype)

        return ModelInput(
            token_ids=on_device(self.tokens[owners, positions], torch.int64),
            positions=on_device(positions, torch.int64),
            slot_mapping=on_device(slots, torch.int64),
            query_start_loc=on_device(starts, torch.int32),
            seq_lens=on_device(ends, torch.int32),
            block_tables=on_device(self.tables[sequences], torch.int32),
            logits_indices=on_device(starts[1:] - 1, torch.int64),
            max_query_len=int(lens.max()),
            max_seq_len=int(ends.max()),
        )

    def logits(self, pieces: list[tuple[int, int, int]]) -> Tensor:
        return self.model.forward(self.model_input(pieces), self.kv)


def other_bits(network: Bench) -> dict[str, Any]:
    """Return the cases whose bits differ: sequences in a decode step, cuts of a prompt, decode against prefill."""
    lens = [1 + (37 * sequence) % 500 for sequence in range(NUM_SEQUENCES)]
    for first in range(0, NUM_SEQUENCES, 16):
        network.logits([(sequence, 0, lens[sequence]) for sequence in range(first, first + 16)])
    step = [(sequence, length, length + 1) for sequence, length in enumerate(lens)]
    together = network.logits(step)
    batches = [size for size in BATCHES if not torch.equal(network.logits(step[:size]), together[:size])]
    alone = [number for number in (5, 99, 255) if not torch.equal(network.logits([step[number]])[0], together[number])]

    whole = network.logits([(0, 0, PROMPT)])
    start, in_chunks = 0, whole
    for end in CHUNKS:
        # A neighbour in the step: another number of rows than the chunk's own.
        in_chunks = network.logits([(0, start, end), (1, 0, 50)])[:1]
        start = end
    decoded = network.logits([(0, PROMPT - 1, PROMPT)])
    return {
        "decode_batches": batches,
        "alone": alone,
        "chunks": not torch.equal(in_chunks, whole),
        "decode_against_prefill": not torch.equal(decoded, whole),
    }


def times(network: Bench) -> dict[str, float]:
    result = {}
    for context, sizes in ((1000, (1, 8, 32, 64, 128, 256)), (8000, (1, 16))):
        network.tables = network.tables.reshape(max(sizes), -1)  # all blocks to these sequences
        for size in sizes:
            model_input = network.model_input([(sequence, context, context + 1) for sequence in range(size)])
            call = [lambda model_input=model_input: network.model.forward(model_input, network.kv)]
            result[f"decode_{size}x{context}_microseconds"] = graph_microseconds(call * 2)
    model_input = network.model_input([(sequence, 0, 1000) for sequence in range(8)])
    call = [lambda model_input=model_input: network.model.forward(model_input, network.kv)]
    result["prefill_8x1000_microseconds"] = graph_microseconds(call * 2)
    return result


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for batch_invariance.json")
    parser.add_argument("--deterministic", action="store_true", help="with the worker's settings of that name")
    parser.add_argument("--num-layers", type=int, default=32)
    options = parser.parse_args(argv)
    if options.deterministic:
        use_batch_invariant_products()
    network = Bench(options.num_layers, options.deterministic)
    result = {
        "device": torch.cuda.get_device_name(),
        "deterministic": options.deterministic,
        "num_layers": options.num_layers,
        "other_bits": other_bits(network),
        "times": times(network),
    }
    print(json.dumps(result, indent=1))
    options.out.mkdir(parents=True, exist_ok=True)
    name = "batch_invariance_deterministic.json" if options.deterministic else "batch_invariance.json"
    (options.out / name).write_text(json.dumps(result, indent=1))
    return 0
