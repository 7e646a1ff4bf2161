"""Decoders without a native implementation run by transformers, with this engine's attention, KV and weights.

Greedy float32 tokens match transformers itself: in one batch, in chunks, preempted by swap and by recompute, forked,
with prefix hits. Unsupported attention is refused by name.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.import_utils import is_kernels_available

from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.model.implementation import blueprint, blueprint_from_directory
from engine_worker.model.transformers_backend import library
from engine_worker.model.transformers_backend.library import ModelNotServed
from shared.messages import TokenEvent, decoded_logprobs
from tests.builders import make_request
from tests.engine_worker.execution.reference import TINY, Reference, make_engine, make_runner, run_engine
from tests.engine_worker.model.families import check_schedules, write_family
from tests.engine_worker.model.family_cases import REFUSED, THROUGH_TRANSFORMERS, Case


@pytest.fixture(scope="module", params=THROUGH_TRANSFORMERS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("model"), THROUGH_TRANSFORMERS[request.param])


def test_greedy_tokens_match_transformers_in_any_schedule(model_dir: Path) -> None:
    assert blueprint_from_directory(model_dir).implementation == "transformers"
    check_schedules(model_dir)


def test_native_and_transformers_backends_agree(tmp_path: Path) -> None:
    directory = write_family(tmp_path, Case("llama", {"attention_bias": True}))
    assert blueprint_from_directory(directory).implementation == "native"
    assert check_schedules(directory, "native") == check_schedules(directory, "transformers")
    native, other = (blueprint_from_directory(directory, wanted).shape for wanted in ("native", "transformers"))
    fields = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings", "dtype")
    assert {name: getattr(native, name) for name in fields} == {name: getattr(other, name) for name in fields}
    assert native.num_parameters() == other.num_parameters()
    assert native.eos_token_ids == other.eos_token_ids


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    REFUSED,
)
def test_unsupported_attention_is_refused_before_loading(model_type: str, changes: dict[str, Any], named: str) -> None:
    config = {**TINY, "head_dim": None, "pad_token_id": 0, "model_type": model_type, **changes}
    with pytest.raises(ModelNotServed) as refusal:
        blueprint(
            {key: value for key, value in config.items() if value is not None or key in changes}, {}, "transformers"
        )
    assert named in str(refusal.value)
    assert len(str(refusal.value)) < 400


@pytest.fixture(scope="module")
def gpt2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("gpt2"), THROUGH_TRANSFORMERS["gpt2"])


def changed(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Write the same model with changed tensors."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("transformer.h.1.ln_2.bias"), "have no transformer.h.1.ln_2.bias"),
        (lambda tensors: tensors.update({"adapter.weight": torch.zeros(2)}), "does not use: adapter.weight"),
        (
            lambda tensors: tensors.update({"transformer.wpe.weight": torch.zeros(2048, 97)}),
            r"transformer.wpe.weight has shape \(2048, 97\); config.json requires \(2048, 96\)",
        ),
    ],
    ids=["missing", "left over", "another shape"],
)
def test_misshapen_tensor_is_refused_by_name(
    gpt2_dir: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make_runner(changed(gpt2_dir, tmp_path, change), num_blocks=4)


def test_bare_decoder_checkpoint_is_the_same_model(gpt2_dir: Path, tmp_path: Path) -> None:
    """GPT-2 was published so: without the decoder's prefix, and with stored masks that are computed today."""

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(4, 4)

    requests = [make_request([5, 6, 7], "p", max_tokens=8, ignore_eos=True)]
    tokens = [
        run_engine(make_runner(directory, num_blocks=8, num_threads=1), requests, max_num_seqs=1,
                   max_num_batched_tokens=16).tokens
        for directory in (gpt2_dir, changed(gpt2_dir, tmp_path, strip))
    ]  # fmt: skip
    assert tokens[0] == tokens[1]


def test_prompt_logprobs_match_transformers(tmp_path: Path) -> None:
    """The head scales its logits, whichever rows are requested."""
    directory = write_family(tmp_path, THROUGH_TRANSFORMERS["cohere, scaled logits"])
    prompt = [5, 900, 31, 7, 7, 450, 3]
    engine = make_engine(make_runner(directory, num_blocks=8, num_threads=1), max_num_seqs=1, max_num_batched_tokens=4)
    engine.add_request(make_request(prompt, "p", max_tokens=1, prompt_logprobs=1))
    found: list[float] = []
    while engine.has_work:
        tokens = (event for event in engine.step() if isinstance(event, TokenEvent))
        found += [
            scored.logprob
            for event in tokens
            if event.prompt_logprobs
            for scored in decoded_logprobs(event.prompt_logprobs.tokens)
        ]
    expected = Reference(directory).logits(prompt, len(prompt)).log_softmax(-1)
    wanted = [float(expected[row, token]) for row, token in enumerate(prompt[1:])]
    assert found == pytest.approx(wanted, abs=1e-4)  # two float32 summation orders


def test_remote_code_is_never_run(gpt2_dir: Path, tmp_path: Path) -> None:
    config = json.loads((gpt2_dir / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelNotServed, match="code that comes with a model never runs"):
        blueprint_from_directory(tmp_path)


def test_missing_transformers_package_is_named(gpt2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = util.find_spec
    monkeypatch.setattr(library, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    with pytest.raises(ModelNotServed, match=r"model_type 'gpt2' has no .*pip install 'pagestream\[transformers\]'"):
        blueprint_from_directory(gpt2_dir)


def test_foreign_kernels_package_is_refused(gpt2_dir: Path, tmp_path: Path) -> None:
    """The library would import names from it that our `kernels` does not have."""
    assert not is_kernels_available(), "transformers takes our package for the other one: see ADR 0008"
    info = tmp_path / "kernels-0.18.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    sys.path.insert(0, str(tmp_path))
    try:
        assert metadata.version("kernels") == "0.18.2"
        with pytest.raises(ModelNotServed, match=r"the package kernels 0\.18\.2 conflicts with pagestream"):
            blueprint_from_directory(gpt2_dir)
    finally:
        sys.path.remove(str(tmp_path))


def test_deterministic_option_is_refused(gpt2_dir: Path) -> None:
    with pytest.raises(ValueError, match="--deterministic: transformers' operators may give other bits"):
        load_model_runner(ExecutionSettings(model=gpt2_dir, deterministic=True), lambda phase, progress, detail: None)


def test_native_model_does_not_import_transformers(tmp_path: Path) -> None:
    directory = write_family(tmp_path, Case("llama"))
    code = """
import sys
from pathlib import Path
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.settings import ExecutionSettings
details = []
settings = ExecutionSettings(model=Path(sys.argv[1]), device="cpu", max_model_len=64, kv_cache_memory_bytes=2**20)
load_model_runner(settings, lambda phase, progress, detail: details.append(detail))
assert any(detail.endswith("native implementation") for detail in details), details
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True, timeout=110)
