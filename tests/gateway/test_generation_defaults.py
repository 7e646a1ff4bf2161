"""generation_config.json supplies the values that a request omits. Values in the request take precedence."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.apis.responses.format import with_sampling
from gateway.model_service import model_options
from gateway.settings import GatewaySettings
from gateway.text.served_model import load_served_model
from shared.messages import SamplingParams
from shared.model_files import ModelFilesError
from shared.settings import SettingsError
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import FakeInferenceClient, says
from tests.gateway.responses import model_says
from tests.tiny_model import write_tiny_model

FILE = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 7,
    "typical_p": 0.5,  # not among vLLM's fields
}
HELD = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "max_tokens": 7}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
HI = [{"role": "user", "content": "hi"}]


def write_model(directory: Path, **defaults: Any) -> Path:
    write_tiny_model(directory, max_model_len=256)
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | defaults))
    return directory


async def sampling_and_answer(gateway: Gateway, url: str, **fields: Any) -> tuple[SamplingParams, Any]:
    """Return the sampling parameters that reach the engine for `fields`, and the answer."""
    model_says(gateway, "Yes.")
    async with gateway.session.post(url, json=fields) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return gateway.engine.requests[-1].sampling, answer


def of(sampling: SamplingParams, names: Any = HELD) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in names}


async def test_omitted_fields_get_the_models_defaults(start_gateway: Any, tmp_path: Path) -> None:
    gateway = await start_gateway(model=write_model(tmp_path / "model", **FILE))
    assert of((await sampling_and_answer(gateway, "/v1/chat/completions", messages=HI))[0]) == HELD
    sampling, answer = await sampling_and_answer(gateway, "/v1/responses", input="hi")
    assert of(sampling) == HELD and (answer["temperature"], answer["top_p"]) == (0.6, 0.9)
    sampling, _ = await sampling_and_answer(gateway, "/v1/messages", model="model", messages=HI, max_tokens=5)
    assert of(sampling) == HELD | {"max_tokens": 5}
    sampling, _ = await sampling_and_answer(gateway, "/v1/completions", prompt="hi")
    assert of(sampling) == HELD | {"max_tokens": 16}  # this API has its own default


async def test_models_file_sets_the_defaults_per_model(start_gateway: Any, tmp_path: Path) -> None:
    directory, path = write_model(tmp_path / "model", **FILE), tmp_path / "models.toml"
    says_so = {
        "by-the-flag": "",
        "the-makers": 'generation_config = "auto"\n',
        "the-apis": 'generation_config = "none"\n',
    }
    path.write_text(
        "".join(f'[[models]]\nmodel = "{directory}"\nnames = ["{name}"]\n{said}' for name, said in says_so.items())
    )
    engines = {name: FakeInferenceClient(says([5])) for name in says_so}
    gateway = await start_gateway(*engines.values(), models_file=path, generation_config="vllm")
    for name, held in (("by-the-flag", NEUTRAL), ("the-makers", HELD), ("the-apis", NEUTRAL)):
        body = {"model": name, "messages": HI}
        async with gateway.session.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
        assert of(engines[name].requests[-1].sampling, held) == held


def test_invalid_generation_config_is_refused_with_its_field(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[[models]]\nmodel = "/m"\ngeneration_config = "/folder"\n')
    with pytest.raises(SettingsError, match="generation_config: expected one of auto, vllm, none; got '/folder'"):
        model_options(GatewaySettings(models_file=path))


async def test_request_fields_override_defaults_even_if_neutral(start_gateway: Any, tmp_path: Path) -> None:
    gateway = await start_gateway(model=write_model(tmp_path / "model", **FILE))
    sampling, _ = await sampling_and_answer(gateway, "/v1/chat/completions", messages=HI, max_tokens=9, **NEUTRAL)
    assert of(sampling) == NEUTRAL | {"max_tokens": 9}
    sampling, _ = await sampling_and_answer(gateway, "/v1/chat/completions", messages=HI, temperature=0, top_p=None)
    assert of(sampling) == HELD | {"temperature": 0.0}
    sampling, answer = await sampling_and_answer(gateway, "/v1/responses", input="hi", temperature=0, top_p=0.5)
    assert (answer["temperature"], answer["top_p"]) == (0, 0.5) and (sampling.temperature, sampling.top_p) == (0, 0.5)


def test_stored_answer_keeps_the_defaults_of_its_creation() -> None:
    """The stored body lacks them, and the gateway that reads it may have other defaults."""
    said, sampling = (
        {"temperature": None, "top_p": 0.5, "store": True},
        SamplingParams(max_tokens=1, seed=0, temperature=0.6),
    )
    held = with_sampling(said, sampling)
    assert held == {"temperature": 0.6, "top_p": 0.5, "store": True}
    assert with_sampling({}, sampling) == {}


async def test_beam_search_ignores_sampling_defaults(start_gateway: Any, tmp_path: Path) -> None:
    gateway = await start_gateway(model=write_model(tmp_path / "model", **FILE))
    body = {"prompt": "hi", "n": 2, "use_beam_search": True, "max_tokens": 4}
    sampling, _ = await sampling_and_answer(gateway, "/v1/completions", **body)
    assert of(sampling, NEUTRAL) == NEUTRAL | {"temperature": 0.0}


@pytest.mark.parametrize("source", ["none", "vllm"])
async def test_generation_config_file_may_be_ignored(start_gateway: Any, tmp_path: Path, source: str) -> None:
    gateway = await start_gateway(model=write_model(tmp_path / "model", **FILE), generation_config=source)
    assert of((await sampling_and_answer(gateway, "/v1/chat/completions", messages=HI))[0], NEUTRAL) == NEUTRAL
    async with gateway.session.get("/v1/models") as response:
        assert "generation_defaults" not in (await response.json())["data"][0]


async def test_models_route_lists_the_defaults(start_gateway: Any, tmp_path: Path) -> None:
    gateway = await start_gateway(model=write_model(tmp_path / "model", temperature=0.6, top_p=None))
    async with gateway.session.get("/v1/models") as response:
        assert (await response.json())["data"][0]["generation_defaults"] == {"temperature": 0.6}


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"temperature": 3.5}, "temperature"),
        ({"top_p": "0.9"}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
    ],
)
def test_invalid_defaults_are_refused(tmp_path: Path, defaults: Any, message: str) -> None:
    model = write_model(tmp_path / "model", **defaults)
    with pytest.raises(ModelFilesError, match=rf"generation_config.json: .*{message}.*--generation-config none"):
        load_served_model(model)
    assert load_served_model(model, generation_config="none").defaults == {}
