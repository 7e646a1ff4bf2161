"""Worker settings: invalid values are refused with the flag's name; defaults depend on the device."""

import pytest

from engine_worker.execution.settings import MAX_NUM_SEQS
from engine_worker.settings import WorkerSettings, physical_cores
from shared.settings import SettingsError, load_settings


def load(*argv: str) -> WorkerSettings:
    return load_settings(WorkerSettings, ["--model", "/models/tiny", *argv], {}, prog="pagestream worker").settings


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--block-size", "12"], "--block-size"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--kv-cache-memory-ratio", "1.5"], "--kv-cache-memory-ratio"),
        (["--kv-cache-memory-bytes", "1G", "--kv-cache-memory-ratio", "0.5"], "--kv-cache-memory-ratio"),
        (["--drain-seconds", "-1"], "--drain-seconds"),
        (["--drain-seconds", "nan"], "--drain-seconds"),
        (["--metrics-port", "70000"], "--metrics-port"),
        (["--step-timeout-seconds", "0"], "--step-timeout-seconds"),
        (["--dead-after", "2"], "--dead-after-seconds"),
        (["--dtype", "int8"], "--dtype"),
        (["--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype"),
        (["--max-prefill-tokens-with-decodes", "0"], "--max-prefill-tokens-with-decodes"),
        (["--swap-space-bytes", "-1"], "--swap-space-bytes"),
        (["--preemption-mode", "drop"], "--preemption-mode"),
    ],
)
def test_settings_invalid_value_names_the_flag(argv: list[str], flag: str) -> None:
    with pytest.raises(SettingsError, match=flag):
        load(*argv)


def test_settings_defaults_depend_on_device() -> None:
    cpu, cuda = load().for_device("cpu"), load().for_device("cuda")
    assert (cpu.execution.max_num_seqs, cpu.execution.max_num_batched_tokens) == (MAX_NUM_SEQS["cpu"], 512)
    assert (cuda.execution.max_num_seqs, cuda.execution.max_num_batched_tokens) == (MAX_NUM_SEQS["cuda"], 8192)
    caps = [settings.scheduling.max_prefill_tokens_with_decodes for settings in (cpu, cuda)]
    assert caps == [256, None]
    assert (cpu.scheduling.async_scheduling, cuda.scheduling.async_scheduling) == (False, True)
    assert cpu.execution.num_threads == physical_cores() >= 1
    given = load("--max-num-seqs", "600", "--num-threads", "3").for_device("cpu").execution
    assert (given.max_num_seqs, given.max_num_batched_tokens, given.num_threads) == (600, 600, 3)


def test_settings_token_budget_below_num_seqs_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"--max-num-batched-tokens: expected at least --max-num-seqs \(64\)"):
        load("--max-num-seqs", "64", "--max-num-batched-tokens", "32").for_device("cpu")
    assert load("--max-num-batched-tokens", "32").for_device("cpu").execution.max_num_seqs == 32


def test_settings_deterministic_requires_cuda() -> None:
    assert load("--deterministic").for_device("cuda").execution.deterministic
    with pytest.raises(SettingsError, match="--deterministic: needs --device cuda"):
        load("--deterministic").for_device("cpu")


def test_settings_swap_space_default_and_swap_requirement() -> None:
    assert load().for_device("cpu").execution.swap_space_bytes == 0
    assert load().for_device("cuda").execution.swap_space_bytes == 4 * 2**30
    assert load("--swap-space-bytes", "1G").for_device("cpu").execution.swap_space_bytes == 2**30
    assert load("--swap-space-bytes", "0").for_device("cuda").execution.swap_space_bytes == 0
    with pytest.raises(SettingsError, match="--preemption-mode swap: expected --swap-space-bytes"):
        load("--preemption-mode", "swap").for_device("cpu")


def test_settings_model_name_defaults_to_directory() -> None:
    assert load().model_name == "tiny"
    assert load("--served-model-name", "smol").model_name == "smol"
