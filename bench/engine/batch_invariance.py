"""Check whether a sequence's bits depend on its batch, through a whole network.

    python -m bench batch-invariance --out DIR [--deterministic] [--num-layers 32 | --model DIR [--quantization fp8]]
    python -m bench batch-invariance --out DIR --device cpu [--model DIR] [--quantization as-stored] [--dtype bfloat16]
                                     [--kv-cache-dtype fp8]

A GPU runs Llama-3.1-8B's layers, or the shape of DIR/config.json, with random weights; a CPU runs a model with weights
(default: the demo model). Logits are compared bit by bit: a decoding sequence alone and in batches; a prompt whole, in
chunks and in other slots; a token decoded and prefilled.
On a CPU the exit status is 1 if a bit differs. On a GPU, decode graphs and a prefill are timed, too, so two runs give
the cost of --deterministic. Writes DIR/batch_invariance.json.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kernel.graph_time import graph_microseconds
from bench.provenance import provenance
from engine_worker.execution.load.load_replica import load_plan, use_batch_invariant_products
from engine_worker.execution.settings import QUANTIZATIONS, ExecutionSettings
from engine_worker.kv.layout import KV_CACHE_DTYPES, kv_cache_dtype
from engine_worker.model.architectures import spec_from_json
from engine_worker.model.model_input import ModelInput
from engine_worker.model.network import Network
from engine_worker.model.served_model import ServedModel
from engine_worker.model.spec import ModelSpec, kv_layout
from engine_worker.model.weights import RandomWeights, SafetensorsWeights
from pagestream.demo_model import ensure_demo_model

BLOCK_SIZE, MAX_LEN = 16, 8192


@dataclass(frozen=True)
class Cases:
    num_sequences: int
    max_tokens: int  # of a decoding sequence
    chunks: tuple[
        int, ...
    ]  # ends; the last is the prompt's; on CUDA one chunk is a single token, which uses another kernel
    batches: tuple[int, ...]
    alone: tuple[int, ...]
    prefilled_together: int  # sequences
    blocks_each: int


CUDA_CASES = Cases(
    256, 500, (33, 35, 300, 301, 698, 700), (1, 2, 7, 16, 17, 33, 64, 65, 100, 128, 200), (5, 99, 255), 16, 66
)
CPU_CASES = Cases(64, 200, (1, 7, 64, 65, 130, 248, 250), tuple(range(1, 64)), (5, 40, 63), 8, 18)


def llama_8b(num_layers: int) -> ModelSpec:
    shape = {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": num_layers, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": MAX_LEN, "rope_theta": 500000.0, "dtype": "bfloat16",
    }  # fmt: skip
    return spec_from_json(shape, {"eos_token_id": 2})


class Bench:
    """The model, a KV pool, and a block table for each sequence of random tokens."""

    def __init__(self, model: ServedModel, device: torch.device, cases: Cases, kv_dtype: str = "auto") -> None:
        spec = model.spec
        self.device, self.model, self.cases = device, model, cases
        layout = kv_layout(spec, BLOCK_SIZE, kv_cache_dtype(kv_dtype, str(model.dtype).removeprefix("torch.")))
        num_groups = len(layout.groups)
        num_blocks = 1 + num_groups * cases.num_sequences * cases.blocks_each  # one block is padding
        self.pool = torch.zeros(layout.pool_shape(num_blocks), dtype=getattr(torch, layout.dtype), device=device)
        self.kv = model.attach(self.pool, layout.places)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(spec.vocab_size, (cases.num_sequences, MAX_LEN), generator=generator)
        block_ids = 1 + torch.randperm(num_blocks - 1, generator=generator)
        self.tables = block_ids.view(num_groups, cases.num_sequences, -1)

    def model_input(self, pieces: list[tuple[int, int, int]]) -> ModelInput:
        """Return the input of pieces (sequence, first token, end) with the logits of each piece's last token."""
        sequences = torch.tensor([sequence for sequence, _, _ in pieces])
        lens = torch.tensor([end - start for _, start, end in pieces])
        ends = torch.tensor([end for _, _, end in pieces])
        starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        positions = torch.cat([torch.arange(start, end) for _, start, end in pieces])
        owners = sequences.repeat_interleave(lens)
        slots = self.tables[:, owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

        def on_device(values: Tensor, dtype: torch.dtype) -> Tensor:
            return values.to(self.device, dtype)

        return ModelInput(
            token_ids=on_device(self.tokens[owners, positions], torch.int64),
            positions=on_device(positions, torch.int64),
            slot_mapping=on_device(slots, torch.int64),
            query_start_loc=on_device(starts, torch.int32),
            seq_lens=on_device(ends, torch.int32),
            block_tables=on_device(self.tables[:, sequences], torch.int32),
            logits_indices=on_device(starts[1:] - 1, torch.int64),
            max_query_len=int(lens.max()),
            max_seq_len=int(ends.max()),
        )

    def logits(self, pieces: list[tuple[int, int, int]]) -> Tensor:
        return self.model.forward(self.model_input(pieces), self.kv)


def other_bits(network: Bench) -> dict[str, Any]:
    """Return the cases whose bits differ: batch sizes, prompt chunks, slots, decode against prefill."""
    cases = network.cases
    lens = [1 + (37 * sequence) % cases.max_tokens for sequence in range(cases.num_sequences)]
    for first in range(0, cases.num_sequences, cases.prefilled_together):
        together_at_first = range(first, first + cases.prefilled_together)
        network.logits([(sequence, 0, lens[sequence]) for sequence in together_at_first])
    step = [(sequence, length, length + 1) for sequence, length in enumerate(lens)]
    together = network.logits(step)
    batches = [size for size in cases.batches if not torch.equal(network.logits(step[:size]), together[:size])]
    alone = [number for number in cases.alone if not torch.equal(network.logits([step[number]])[0], together[number])]

    prompt = cases.chunks[-1]
    whole = network.logits([(0, 0, prompt)])
    start, in_chunks = 0, whole
    for end in cases.chunks:
        # A second sequence changes the number of rows of the step.
        in_chunks = network.logits([(0, start, end), (1, 0, 50)])[:1]
        start = end
    decoded = network.logits([(0, prompt - 1, prompt)])
    network.tables = network.tables.flip(1, 2)
    elsewhere = network.logits([(0, 0, prompt)])
    return {
        "decode_batches": batches,
        "alone": alone,
        "chunks": not torch.equal(in_chunks, whole),
        "decode_against_prefill": not torch.equal(decoded, whole),
        "slots": not torch.equal(elsewhere, whole),
    }


def times(network: Bench) -> dict[str, float]:
    result = {}
    for context, sizes in ((1000, (1, 8, 32, 64, 128, 256)), (8000, (1, 16))):
        # All blocks belong to these sequences.
        network.tables = network.tables.reshape(len(network.tables), max(sizes), -1)
        for size in sizes:
            model_input = network.model_input([(sequence, context, context + 1) for sequence in range(size)])
            call = [lambda model_input=model_input: network.model.forward(model_input, network.kv)]
            result[f"decode_{size}x{context}_microseconds"] = graph_microseconds(call * 2)
    model_input = network.model_input([(sequence, 0, 1000) for sequence in range(8)])
    call = [lambda model_input=model_input: network.model.forward(model_input, network.kv)]
    result["prefill_8x1000_microseconds"] = graph_microseconds(call * 2)
    return result


def on_cuda(options: argparse.Namespace) -> Bench:
    if options.deterministic:
        use_batch_invariant_products()
    device = torch.device("cuda")
    weights = RandomWeights(device, torch.bfloat16)
    if options.model is None:
        model: ServedModel = Network(llama_8b(options.num_layers), weights, MAX_LEN, options.deterministic)
    else:
        settings = ExecutionSettings(
            model=options.model, device="cuda", load_format="dummy", quantization=options.quantization
        )
        model = load_plan(settings).blueprint.build(weights, MAX_LEN, options.deterministic)
    return Bench(model, device, CUDA_CASES, options.kv_cache_dtype)


def on_cpu(options: argparse.Namespace) -> Bench:
    directory = options.model or ensure_demo_model(lambda phase, progress, detail: None)
    plan = load_plan(ExecutionSettings(
        model=directory, device="cpu", dtype=options.dtype, quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
    ))  # fmt: skip
    weights = SafetensorsWeights(directory, plan.device, plan.dtype, lambda progress, detail: None)
    model = plan.blueprint.build(weights, CPU_CASES.chunks[-1], False)
    return Bench(model, plan.device, CPU_CASES, plan.settings.kv_cache_dtype)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench batch-invariance", description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="PATH", type=Path, required=True, help="folder for batch_invariance.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--deterministic", action="store_true", help="use the worker's --deterministic kernels (CUDA)")
    parser.add_argument("--num-layers", metavar="N", type=int, default=32, help="of CUDA")
    parser.add_argument(
        "--model", metavar="PATH", type=Path, default=None, help="model directory; a GPU reads its config.json only"
    )
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="auto", help="of the model")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of a CPU")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="of the model")
    options = parser.parse_args(argv)
    is_cuda = options.device == "cuda"
    network = on_cuda(options) if is_cuda else on_cpu(options)
    found = other_bits(network)
    result = {
        **provenance(["batch-invariance", *argv]),
        "device": torch.cuda.get_device_name() if is_cuda else torch.backends.cpu.get_cpu_capability(),
        "deterministic": options.deterministic,
        "dtype": str(network.model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(network.pool.dtype).removeprefix("torch."),
        "num_layers": network.model.spec.num_layers,
        "other_bits": found,
        **({"times": times(network)} if is_cuda else {}),
    }
    print(json.dumps(result, indent=1))
    options.out.mkdir(parents=True, exist_ok=True)
    name = "batch_invariance_deterministic.json" if options.deterministic else "batch_invariance.json"
    (options.out / name).write_text(json.dumps(result, indent=1))
    return 1 if not is_cuda and any(found.values()) else 0
