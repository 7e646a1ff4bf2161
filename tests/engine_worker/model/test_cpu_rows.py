"""On a CPU a row's bits depend only on its sequence: alone, in a batch, decoded, and in prompt chunks."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from engine_worker.model.architectures import spec_from_json
from engine_worker.model.compiled_step import CompiledDevice, step_kernels
from engine_worker.model.decode_programs import decode_programs
from engine_worker.model.model_input import ModelInput
from engine_worker.model.network import Network
from engine_worker.model.quantization.dense_cpu import rows_are_independent
from engine_worker.model.weights import RandomWeights
from kernels.cpu import step
from kernels.cpu.build import NoLibrary
from kernels.fp8_kv import E4M3

BLOCK_SIZE, LONGEST, NUM_SEQUENCES = 8, 160, 64
BATCHES = (1, 2, 3, 5, 6, 7, 9, 16, 33, 64)
CHUNKS = (0, 1, 7, 40, 104, 150)


class Engine:
    """A network of two layers and the KV pool of many sequences."""

    def __init__(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, **changed: object) -> None:
        shape = {
            "model_type": "qwen3", "vocab_size": 300, "hidden_size": 72, "intermediate_size": 100, "head_dim": 24,
            "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True,
            "max_position_embeddings": LONGEST, "dtype": "bfloat16", **changed,
        }  # fmt: skip
        spec = spec_from_json(shape, {"eos_token_id": 2})
        torch.manual_seed(0)
        self.model = Network(spec, RandomWeights(torch.device("cpu"), dtype), LONGEST)
        blocks = LONGEST // BLOCK_SIZE
        self.tables = (1 + torch.randperm(NUM_SEQUENCES * blocks)).view(NUM_SEQUENCES, blocks)
        pool = torch.zeros(1 + NUM_SEQUENCES * blocks, 2, 2, 2, BLOCK_SIZE, 24, dtype=kv_dtype or dtype)
        self.device = self.model.attach(pool)
        self.tokens = torch.randint(300, (NUM_SEQUENCES, LONGEST))

    def logits(self, *pieces: tuple[int, int, int]) -> torch.Tensor:
        """Return the logits of the last token of each piece (sequence, first token, end)."""
        return self.model.forward(self.step(*pieces), self.device)

    def step(self, *pieces: tuple[int, int, int]) -> ModelInput:
        owners = torch.cat([torch.full((end - first,), sequence) for sequence, first, end in pieces])
        positions = torch.cat([torch.arange(first, end) for _, first, end in pieces])
        lengths = torch.tensor([end - first for _, first, end in pieces])
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        blocks = self.tables[owners, positions // BLOCK_SIZE]
        return ModelInput(
            token_ids=self.tokens[owners, positions],
            positions=positions,
            slot_mapping=(blocks * BLOCK_SIZE + positions % BLOCK_SIZE)[None],
            query_start_loc=starts.int(),
            seq_lens=torch.tensor([end for _, _, end in pieces], dtype=torch.int32),
            block_tables=self.tables[[sequence for sequence, _, _ in pieces]].int()[None],
            logits_indices=starts[1:] - 1,
            max_query_len=int(lengths.max()),
            max_seq_len=max(end for _, _, end in pieces),
        )


TYPES = [
    (torch.float32, None),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, None),
    (torch.float32, E4M3),
    (torch.bfloat16, E4M3),
]


@pytest.fixture(scope="module", params=TYPES, ids=str)
def engine(request: pytest.FixtureRequest) -> Engine:
    dtype, kv_dtype = request.param
    engine = Engine(dtype, kv_dtype)
    try:
        step_kernels(engine.model.spec, dtype, kv_dtype or dtype)
    except NoLibrary as error:
        pytest.skip(f"rows depend on their batch without the C++ kernels: {error}")
    assert isinstance(engine.device, CompiledDevice)
    return engine


def test_sequence_decodes_the_same_in_any_batch(engine: Engine) -> None:
    lengths = [1 + 37 * sequence % (LONGEST - 1) for sequence in range(NUM_SEQUENCES)]
    engine.logits(*((sequence, 0, length) for sequence, length in enumerate(lengths)))
    step = sorted(((sequence, n, n + 1) for sequence, n in enumerate(lengths)), key=lambda piece: piece[2])
    together = engine.logits(*step)
    for size in BATCHES:
        assert torch.equal(engine.logits(*step[:size]), together[:size]), size
    for number in (5, 40, 63):
        assert torch.equal(engine.logits(step[number]), together[number : number + 1])


def test_prompt_chunks_and_decode_have_the_same_bits(engine: Engine) -> None:
    whole = engine.logits((0, 0, CHUNKS[-1]))
    for first, end in pairwise(CHUNKS):
        in_chunks = engine.logits((1, 0, 50), (0, first, end))[1:]
    assert torch.equal(in_chunks, whole)
    assert torch.equal(engine.logits((0, CHUNKS[-1] - 1, CHUNKS[-1])), whole)


def test_decode_program_has_the_bits_of_its_operators(engine: Engine) -> None:
    programs = decode_programs(engine.model, engine.device)
    assert programs is not None
    if engine.model.dtype != torch.float32:  # its dense layers start with a torch operator
        with torch.inference_mode():
            assert programs.logits_of(engine.step((0, 3, 4))) is None
        return
    engine.logits(*((sequence, 0, 40 + sequence) for sequence in range(NUM_SEQUENCES)))
    for first, size in ((0, 1), (7, 3), (20, 1), (0, 32), (31, 3), (40, 17)):
        pieces = [(sequence, 40 + sequence, 41 + sequence) for sequence in range(first, first + size)]
        step, wanted = engine.step(*pieces), engine.logits(*pieces)
        logits = programs.logits_of(step)
        assert logits is not None
        assert torch.equal(logits, wanted)
        logits = programs.logits_of(replace(step, logits_indices=step.logits_indices.flip(0)))
        assert logits is not None
        assert torch.equal(logits, wanted.flip(0))
    assert programs.logits_of(engine.step((0, 0, 9))) is None
    assert programs.logits_of(engine.step(*((sequence, 3, 4) for sequence in range(33)))) is None


def test_decode_program_works_past_the_sharing_threshold(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine.model.dtype != torch.float32:
        pytest.skip("nothing is recorded of bfloat16")
    programs = decode_programs(engine.model, engine.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for shared_from in (1000, 100):  # recorded without shared tokens, replayed with them
            monkeypatch.setattr(step, "_SHARED_KEYS", shared_from)
            assert programs is not None
            for length in (90, 99, 100, 130, 140):
                engine.logits((0, 0, length))
                logits = programs.logits_of(engine.step((0, length, length + 1)))
                assert logits is not None
                assert torch.equal(logits, engine.logits((0, 0, length + 1)))
    finally:
        torch.set_num_threads(threads)


def test_unsupported_network_runs_operator_by_operator(caplog: pytest.LogCaptureFixture) -> None:
    """Experts without groups are a loop in torch."""
    engine = Engine(
        torch.float32, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    )
    programs = decode_programs(engine.model, engine.device)
    if programs is None:
        pytest.skip("no C++ kernels")
    with caplog.at_level("INFO", "worker"):
        assert programs.logits_of(engine.step((0, 3, 4))) is None
    assert "is not a C++ kernel" in caplog.text
    assert programs.logits_of(engine.step((0, 3, 4))) is None
    assert engine.logits((0, 3, 4)).isfinite().all()


def test_batch_dependent_rows_are_detected() -> None:
    def by_number(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x * (1.0 if len(x) > 2 else 1.0 + 2.0**-20)

    def alone(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x * 2.0

    x = torch.ones(9, 24)
    assert rows_are_independent(alone, x, torch.float32)
    assert not rows_are_independent(by_number, x, torch.float32)
