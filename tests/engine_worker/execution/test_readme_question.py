"""README's question with 4-bit and 8-bit weights, on each instruction set of this CPU, with both KV dtypes."""

from pathlib import Path

import pytest

from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import IN_GROUPS, ExecutionSettings
from kernels.cpu.build import NoLibrary
from kernels.cpu.library import InstructionSet, cpu_library
from kernels.cpu.linear import linear_kernels
from tests.engine_worker.execution.readme_question import answers_of

ANSWER = "The capital of France is Paris."


@pytest.mark.parametrize(("kv_cache_dtype", "kept"), [("auto", "bfloat16"), ("float32", "float32")])
@pytest.mark.parametrize("quantization", IN_GROUPS)
@pytest.mark.parametrize("instruction_set", InstructionSet)
def test_readme_answer_is_correct_cached_or_not(
    demo_model_dir: Path,
    instruction_set: InstructionSet,
    quantization: str,
    kv_cache_dtype: str,
    kept: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    try:
        found = linear_kernels()  # before `instruction_sets` is replaced
    except NoLibrary as error:
        pytest.skip(f"no C++ kernels here: {error}")
    if instruction_set not in found:
        pytest.skip(f"this processor has no {instruction_set.name}")
    monkeypatch.setattr(cpu_library(), "instruction_sets", (instruction_set,))
    settings = ExecutionSettings(
        model=demo_model_dir, device="cpu", quantization=quantization, kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=2**25, max_model_len=256,
    )  # fmt: skip
    runner = load_model_runner(settings, lambda phase, progress, detail: None)
    assert (runner.dtype_name, runner.kv_cache_dtype) == ("float32", kept)
    asked = answers_of(runner, demo_model_dir)
    assert asked["answers"] == [ANSWER] * 2
    assert asked["cached_tokens"] > 16
