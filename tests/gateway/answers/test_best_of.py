"""best_of withholds samples, ranks them by likelihood, and answers with the best."""

from collections.abc import Iterable

import pytest

from gateway.text.served_model import ServedModel
from shared.messages import FinishReason, GenerationRequest, StreamEvent, TokenEvent, TokenLogprobs, encoded_logprobs
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import Script, finish
from tests.gateway.test_routes_inference import ids, read_events


def best_of_script(texts: list[list[int]], logprobs: list[float]) -> Script:
    """Return a script: sample i says texts[i], each token with logprob logprobs[i]; the first sample ends last."""

    def script(request: GenerationRequest) -> Iterable[StreamEvent]:
        assert (request.sampling.n, request.sampling.logprobs) == (len(texts), 0)
        for choice in reversed(range(len(texts))):
            tokens = [encoded_logprobs(TokenLogprobs(logprobs[choice], (), ()))] * len(texts[choice])
            yield TokenEvent(request.request_id, 0, texts[choice], choice, FinishReason.STOP, tokens)
        yield finish(request, sum(map(len, texts)))

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_best_of_samples_are_sorted_by_likelihood(
    gateway: Gateway, tiny_model: ServedModel, stream: bool
) -> None:
    """Sort by the sum of logprobs: "x" has -0.9, "qqqq" -1.2, "zz" -1.8."""
    texts = [ids(tiny_model, text) for text in ("qqqq", "zz", "x")]
    assert [len(text) for text in texts] == [4, 2, 1]
    gateway.engine.script = best_of_script(texts, [-0.3, -0.9, -0.9])
    body = {"prompt": "p", "best_of": 3, "n": 2, "stream": stream, "stream_options": {"include_usage": True}}
    if not stream:
        del body["stream_options"]
    async with gateway.session.post("/v1/completions", json=body) as response:
        if stream:
            *events, last, _ = await read_events(response)
            answers = [event["choices"][0] for event in events if event["choices"][0]["text"]]
            usage = last["usage"]
        else:
            answer = await response.json()
            answers, usage = answer["choices"], answer["usage"]
    assert [(choice["index"], choice["text"]) for choice in answers] == [(0, "x"), (1, "qqqq")]
    assert all(choice["logprobs"] is None for choice in answers)
    assert usage["completion_tokens"] == 7  # the withheld sample counts too


async def test_best_of_stop_string_ends_one_sample(gateway: Gateway, tiny_model: ServedModel) -> None:
    """Ignore tokens after the stop string; cancel at the engine only after all samples have ended."""
    texts = [ids(tiny_model, text) for text in ("zz", "q!qq")]
    gateway.engine.script = best_of_script(texts, [-0.5, -0.25])
    body = {"prompt": "p", "best_of": 2, "n": 1, "stop": "!"}
    async with gateway.session.post("/v1/completions", json=body) as response:
        (choice,) = (await response.json())["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("q", "stop")  # -0.5 for "q!", -1 for "zz"
