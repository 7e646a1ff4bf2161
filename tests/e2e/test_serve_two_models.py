"""`pagestream serve --models-file`: two small models, a worker each; one's death does not affect the other."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_serve import Serve
from tests.engine_worker.execution.reference import write_model
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="finds workers by their command lines, as on Linux"),
]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:  # tmp_path is too long for a unix socket
        model = write_model(write_tiny_model(Path(directory, "tiny")), vocab_size=VOCAB_SIZE)
        models_file = Path(directory, "models.toml")
        models_file.write_text(
            f'[[models]]\nmodel = "{model}"\nnames = ["first", "alias"]\nmax_model_len = 2000\n'
            f'worker = {{ kv-cache-memory-bytes = "8M" }}\n'
            f'[[models]]\nmodel = "{model}"\nnames = ["second"]\nmax_model_len = 64\n'
            f'worker = {{ kv-cache-memory-bytes = "4M" }}\n'
        )
        one = Serve(Path(directory), "--models-file", str(models_file))
        yield one
        one.close()


def answer(serve: Serve, model: str, max_tokens: int) -> Iterator[str]:
    return serve.chat([{"role": "user", "content": "hi"}], model=model, max_tokens=max_tokens, ignore_eos=True)


def test_death_of_one_model_does_not_affect_the_other(serve: Serve) -> None:
    serve.wait_for_line("Ready after")
    assert "first, second, 1 gateway, 2 engine workers" in serve.lines[0]
    listed = {model["id"]: model["max_model_len"] for model in serve.get("/v1/models")[1]["data"]}
    assert listed == {"first": 2000, "alias": 2000, "second": 64}
    assert serve.get("/ready")[1]["models"] == {"first": "ready", "second": "ready"}
    undisturbed, short = "".join(answer(serve, "first", 600)), "".join(answer(serve, "second", 10))
    assert undisturbed.startswith(short.removesuffix("<length>"))  # the same weights

    (worker,) = [one for one in serve.workers() if "first" in one.cmdline()]
    pieces = []
    for piece in answer(serve, "alias", 600):
        pieces.append(piece)
        if len(pieces) == 12:
            worker.kill()
            serve.wait_for_line("worker-0  died (signal 9)")
            assert "".join(answer(serve, "second", 10)) == short
    assert "".join(pieces) == undisturbed
