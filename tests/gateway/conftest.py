"""A model directory small enough to make in milliseconds, and a gateway that answers on a real port."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.app import RUNNER_OPTIONS, create_app
from gateway.keys import STATE
from gateway.metrics import GatewayMetrics
from gateway.served_model import ServedModel, load_served_model
from gateway.settings import GatewaySettings
from tests.gateway.fake_inference import FakeInferenceClient

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
MAX_MODEL_LEN = 256
VOCAB_SIZE = 320  # more than the tokenizer knows, as in models with padded embeddings
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with a few merges, so that characters outside ASCII take several tokens."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [
        AddedToken(text, special=True, normalized=False) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the capital of France is Paris, the end of the user and the assistant"], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config.json": {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN},
        "generation_config.json": {"eos_token_id": IM_END},
        "tokenizer_config.json": {
            "chat_template": CHAT_TEMPLATE,
            "bos_token": "<|im_start|>",
            "eos_token": {"content": "<|im_end|>"},
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="session")
def tiny_model(tiny_model_dir: Path) -> ServedModel:
    return load_served_model(tiny_model_dir)


class Gateway:
    """A running gateway, its fake engine, and a client of it."""

    def __init__(
        self, app: web.Application, engine: FakeInferenceClient, session: aiohttp.ClientSession, port: int
    ) -> None:
        self.state = app[STATE]
        self.routes = [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource]
        self.engine = engine
        self.session = session
        self.port = port

    def metric(self, name: str, **labels: str) -> float | None:
        return self.state.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
async def start_gateway(tiny_model_dir: Path) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def start(engine: FakeInferenceClient | None = None, *, wait: bool = True, **changes: Any) -> Gateway:
            engine = engine or FakeInferenceClient()
            settings = replace(GatewaySettings(model=tiny_model_dir, port=0), **changes)
            app = create_app(settings, engine, GatewayMetrics(CollectorRegistry()))  # type: ignore[arg-type]
            runner = web.AppRunner(app, shutdown_timeout=0.5, **RUNNER_OPTIONS)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            session = await stack.enter_async_context(aiohttp.ClientSession(f"http://{host}:{port}"))
            gateway = Gateway(app, engine, session, port)
            if wait:
                await gateway.state.model_loaded.wait()
            return gateway

        yield start


@pytest.fixture
async def gateway(start_gateway: Callable[..., Any]) -> Gateway:
    return await start_gateway()  # type: ignore[no-any-return]
