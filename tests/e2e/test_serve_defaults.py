"""`pagestream serve` applies defaults of the model's generation_config.json unless a flag turns them off."""

import json
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_serve import Serve
from tests.engine_worker.execution.reference import write_model
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

pytestmark = pytest.mark.timeout(500)


@contextmanager
def served(*arguments: str) -> Iterator[Serve]:
    with tempfile.TemporaryDirectory(prefix="ps-") as state:  # tmp_path is too long for a unix socket
        one = Serve(Path(state), *arguments)
        try:
            one.wait_for_line("Ready after")
            yield one
        finally:
            one.close()


def response(serve: Serve, **fields: Any) -> Any:
    body = json.dumps({"input": "hi", "ignore_eos": True, **fields}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{serve.port}/v1/responses", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_model_defaults_apply_unless_turned_off(tmp_path: Path) -> None:
    model = write_model(write_tiny_model(tmp_path / "model"), vocab_size=VOCAB_SIZE)
    path, defaults = model / "generation_config.json", {"temperature": 0.5, "max_new_tokens": 3}
    path.write_text(json.dumps(json.loads(path.read_text()) | defaults))
    with served("--model", str(model)) as serve:
        _, listed = serve.get("/v1/models")
        assert listed["data"][0]["generation_defaults"] == defaults
        answer = response(serve)
        assert (answer["temperature"], answer["usage"]["output_tokens"]) == (0.5, 3)
        answer = response(serve, temperature=0, max_output_tokens=17)
        assert (answer["temperature"], answer["usage"]["output_tokens"]) == (0, 17)
    with served("--model", str(model), "--generation-config", "none") as serve:
        answer = response(serve, max_output_tokens=17)
        assert (answer["temperature"], answer["usage"]["output_tokens"]) == (1.0, 17)
