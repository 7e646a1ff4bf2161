"""Tool calls of an engine with speculative decoding: every parser gives what it gives without drafts, at any length.

The engine says a given text. Its drafts decide how many tokens come in an event, so they cut the text anywhere.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine_worker.kv.sequence import Sequence
from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.drafting import Proposer
from engine_worker.scheduling.speculation.proposers import PROPOSERS
from gateway.settings import TOOL_CALL_PARSERS
from shared.messages import GenerationRequest, StreamEvent, TokenEvent
from tests.builders import FakeModelRunner, drafting_by, make_engine
from tests.gateway.conftest import Gateway
from tests.gateway.parsing.test_call_formats import CASES as OF_FAMILIES
from tests.gateway.parsing.test_call_formats import SCHEMAS
from tests.gateway.parsing.test_tool_calls import CASES
from tests.gateway.responses import tokens_of
from tests.proposers import FakeHead, FunctionProposer
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
SAME_FORMAT = {"deepseek_v31": "deepseek_v3", "openai": "harmony", "qwen3_xml": "qwen3_coder"}
MAX_DRAFTS, NUM_CUTS = 7, 3
MAX_MODEL_LEN = 4096

MakeProposer = Callable[[list[int]], Proposer]


class SayingRunner(FakeModelRunner):
    """Generates given tokens, then the first token that ends the sequence."""

    def __init__(self, token_ids: list[int], **options: Any) -> None:
        super().__init__(**options)
        self._token_ids = token_ids

    def _token_after(self, prefix: list[int], index: int, sequence: Sequence) -> int:
        return self._token_ids[index] if index < len(self._token_ids) else min(sequence.stop_token_ids)


def oracle(token_ids: list[int]) -> Proposer:
    random = Random(1)
    return FunctionProposer(lambda one: token_ids[one.num_output_tokens :][: random.randint(0, MAX_DRAFTS)])


def mistaken(token_ids: list[int]) -> Proposer:
    """Propose the right tokens and, after some of them, wrong ones."""
    random = Random(2)

    def guess(one: Sequence) -> list[int]:
        return [*token_ids[one.num_output_tokens :][: random.randint(0, 4)], random.randrange(VOCAB_SIZE)]

    return FunctionProposer(guess)


def of_product(method: str, _: list[int]) -> Proposer:
    return PROPOSERS[method](SpeculativeConfig(method=method, num_speculative_tokens=MAX_DRAFTS))


MAKERS: dict[str, MakeProposer] = {
    "oracle": oracle,
    "mistaken": mistaken,
    **{method: partial(of_product, method) for method in ("ngram", "suffix")},
    "eagle3": lambda _: FakeHead(MAX_DRAFTS),
}


class Engine:
    """Answers every request with the same tokens; as a script of the fake client it runs the engine's steps."""

    def __init__(self, token_ids: list[int], make: MakeProposer | None) -> None:
        self._token_ids, self._make = token_ids, make
        self.event_sizes: list[int] = []

    def __call__(self, request: GenerationRequest) -> Iterable[StreamEvent]:
        options: dict[str, Any] = {"num_blocks": MAX_MODEL_LEN // 16 + 1, "block_size": 16, "vocab_size": VOCAB_SIZE}
        proposer = self._make(self._token_ids) if self._make is not None else None
        drafting = drafting_by(proposer, MAX_DRAFTS) if proposer is not None else None
        error_ratio = 0.2 if isinstance(proposer, FakeHead) else None
        engine = make_engine(
            SayingRunner(self._token_ids, draft_error_ratio=error_ratio, **options),
            drafting=drafting,
            max_model_len=MAX_MODEL_LEN,
            **options,
        )
        engine.add_request(request)
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    self.event_sizes.append(len(event.token_ids))
                yield event


def text_of(parser: str) -> str:
    """Return an answer of the family with the longest calls."""
    family = SAME_FORMAT.get(parser, "hermes" if parser == "auto" else parser)
    texts = [text for name, text, (_, _, calls) in [*CASES, *OF_FAMILIES] if name == family and calls]
    return max(texts, key=len)


async def calls_of(gateway: Gateway, engine: Engine, text: str, max_tokens: int) -> Any:
    """Return the message of one answer. The prompt has the text, so that proposers find it."""
    gateway.engine.script = engine
    body = {"messages": [{"role": "user", "content": text}], "tools": TOOLS, "max_tokens": max_tokens}
    async with gateway.session.post("/v1/chat/completions", json=body) as response:
        data = await response.json()
        assert response.status == 200, data
    (choice,) = data["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
    return choice["message"].get("content"), calls, choice["finish_reason"], data["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "roomy", max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
async def test_calls_equal_those_without_drafts(start_gateway: Any, model_dir: Path, parser: str) -> None:
    gateway = await start_gateway(model=model_dir, tool_call_parser=parser)
    text = text_of(parser)
    token_ids = tokens_of(gateway.service.require_model(), text)
    lengths = [*Random(parser).sample(range(2, len(token_ids)), NUM_CUTS), len(token_ids) + 1]
    for max_tokens in lengths:
        expected = await calls_of(gateway, Engine(token_ids, None), text, max_tokens)
        for name, make in MAKERS.items():
            engine = Engine(token_ids, make)
            assert await calls_of(gateway, engine, text, max_tokens) == expected, (name, max_tokens)
            assert max_tokens < len(token_ids) or max(engine.event_sizes) > 1, f"{name} gave no draft that was right"
    assert expected[1], "the whole answer has calls"
