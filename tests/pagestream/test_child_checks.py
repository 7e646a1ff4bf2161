"""`serve` refuses what its children would refuse, before the store starts, with their own words."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagestream.child_checks import ChildRefused, check_children
from pagestream.child_process import ChildCommand


def command(module: str, *words: str) -> ChildCommand:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PAGESTREAM_")}
    return ChildCommand(name=module, argv=[sys.executable, "-m", module, *words], environ=environ)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine_worker", "--prot", "8410"], "unknown option --prot 8410; did you mean --port?"),
        (
            ["engine_worker", "--otlp-traces-endpoint", "nonsense"],
            "--otlp-traces-endpoint: expected a URL such as http",
        ),
        (["gateway", "--api-keys-file", "/no/keys.toml"], "--api-keys-file: /no/keys.toml: No such file or directory"),
        (["engine_worker", "--quantizations", "fp8"], "did you mean --quantization?"),
        (["engine_worker", "--quantization", "nvfp4"], "--quantization: expected one of auto, none, fp8"),
        (["gateway", "--host", "0.0.0.0"], "--host 0.0.0.0 is not a loopback address, and no API key is set"),
        (
            ["gateway", "--max-num-streams", "many"],
            "--max-num-streams: expected a number such as 4096, 16k or 16K; got 'many'",
        ),
    ],
)
async def test_refused_settings_are_named(words: Sequence[str], message: str) -> None:
    with pytest.raises(ChildRefused) as refused:
        await check_children([command(*words, "--model", "nowhere")])
    assert message in str(refused.value)


async def test_context_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = {"model_type": "llama", "vocab_size": 128, "max_position_embeddings": 2048, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--model", str(tmp_path), "--load-format", "dummy", "--max-model-len", "1000k"]
    with pytest.raises(ChildRefused, match="expected at most 2048, the model's positions; got 1000000"):
        await check_children([command("engine_worker", *words)])


async def test_good_settings_pass() -> None:
    await check_children([command("gateway", "--model", "nowhere"), command("engine_worker", "--model", "nowhere")])
