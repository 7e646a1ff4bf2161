"""The models that `pagestream serve MODEL` may name: `demo`, a .gguf file, a directory, or ORG/NAME on the hub.

It is used at the start of `serve`, before the workers. It knows where files are, and nothing of networks.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from pagestream.demo_model import DEMO_MODEL_NAME, demo_model_directory, prepare_demo_model
from pagestream.gguf_model import ModelUnavailable, convert_once, converted_directory
from pagestream.hub_model import DEFAULT_REVISION, hub_directory, is_hub_name, prepare_hub_model
from pagestream.phases import PhaseReport
from pagestream.serve_settings import DEMO


@dataclass(frozen=True)
class ModelSource:
    """`directory` is known before it exists, so that a gateway can be started to tell of the preparation."""

    name: str
    directory: Path
    prepare: Callable[[PhaseReport], Awaitable[object]]  # raises ModelUnavailable


def find_model(model: str, revision: str = DEFAULT_REVISION) -> ModelSource:
    """Raises ModelUnavailable for what is none of them. `revision`: of a model on the hub. What is here goes first."""
    if model == DEMO:
        return ModelSource(DEMO_MODEL_NAME, demo_model_directory(), prepare_demo_model)
    path = Path(model).expanduser().resolve()
    if path.is_file() and path.suffix == ".gguf":
        target = converted_directory(path)
        return ModelSource(path.stem, target, lambda report: convert_once(path, target, report))
    if path.is_dir():
        return ModelSource(path.name, path, lambda report: _check_directory(path))
    if is_hub_name(model) and not path.exists():
        directory = hub_directory(model, revision)
        return ModelSource(model, directory, lambda report: prepare_hub_model(model, revision, report))
    kind = "is no model directory and no .gguf file" if path.exists() else "does not exist"
    raise ModelUnavailable(f"{model} {kind}; give a directory, a .gguf file, ORG/NAME, or the word {DEMO}")


async def _check_directory(path: Path) -> None:
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if missing:
        raise ModelUnavailable(f"{path} has no {' and no '.join(missing)}")
