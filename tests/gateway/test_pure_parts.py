"""Small pure modules: admission, response bytes, seeds, settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.apis.chat.format import ChatFormat
from gateway.apis.chat.schema import parse_chat
from gateway.apis.completions.schema import parse_completion
from gateway.errors import Unavailable
from gateway.fleet import (
    RETRY_AFTER_SECONDS,
    STALE_AFTER_SECONDS,
    Fleet,
    check_state,
    ready_workers,
    state_of,
)
from gateway.http.json_body import decode_body
from gateway.model_service import ModelOptions, model_options
from gateway.pipeline.choice_writer import ChoiceDelta
from gateway.pipeline.plan import plan_requests
from gateway.pipeline.response_format import ReplyHeader, UsageCount, json_text
from gateway.settings import TOOL_CALL_PARSERS, GatewaySettings
from gateway.text.served_model import ModelLimits
from shared.choice_seeds import choice_seed
from shared.messages import WorkerHeartbeat, WorkerPhase
from shared.settings import SettingsError, load_settings

LIMITS = ModelLimits(max_model_len=100, vocab_size=50)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"draining": True}, "draining"),
        ({"model_loaded": False}, "starting"),
        ({"num_ready": 0, "was_ready": False}, "starting"),
        ({"num_ready": 0}, "no_worker"),
        ({"num_ready": 0, "is_waited_for": True}, None),
        ({"num_ready": 0, "is_waited_for": True, "was_ready": False}, "starting"),
        ({"num_ready": 0, "is_waited_for": True, "store_has_room": False}, "store_full"),
        ({"store_has_room": False}, "store_full"),
    ],
)
def test_admission_checks_the_ready_workers(changes: dict[str, bool], reason: str | None) -> None:
    usual = {"draining": False, "model_loaded": True, "num_ready": 1, "was_ready": True, "is_waited_for": False}
    store_has_room = changes.get("store_has_room", True)
    state = state_of(**{name: changes.get(name, value) for name, value in usual.items()})  # type: ignore[arg-type]
    if reason is None:
        check_state(state, store_has_room=store_has_room)
        return
    with pytest.raises(Unavailable) as refused:
        check_state(state, store_has_room=store_has_room)
    assert refused.value.code == reason and refused.value.message
    assert refused.value.retry_after_seconds == RETRY_AFTER_SECONDS[reason] >= 1


def test_ready_workers_are_evaluated_at_each_call() -> None:
    """Repeated calls in between change nothing."""
    now = 100.0
    fleet = Fleet(clock=lambda: now)

    def beat(worker_id: str, **fields: Any) -> None:
        fleet.record_heartbeat(
            WorkerHeartbeat(worker_id=worker_id, **{"phase": WorkerPhase.READY, "running": 1, **fields})
        )

    def ready() -> list[str]:
        assert fleet.ready == ready_workers(fleet.snapshot())
        return [heartbeat.worker_id for heartbeat in fleet.ready]

    assert ready() == []
    beat("a", phase=WorkerPhase.LOAD)
    assert ready() == [] and not fleet.was_ready.is_set()
    beat("a", step=1)
    assert ready() == ["a"] and fleet.was_ready.is_set()
    now += 5.0
    beat("b", step=1)
    beat("supervisor")
    assert ready() == ["a", "b"]
    now += STALE_AFTER_SECONDS - 5.0
    assert ready() == ["b"]  # a is silent for as long
    for second in range(15):
        now += 1.0
        beat("a", step=second)
        beat("b", step=1)  # makes no progress
    assert ready() == ["a"]
    beat("b", step=2)
    beat("a", step=15, phase=WorkerPhase.DRAINING)
    assert ready() == ["b"]


@pytest.mark.parametrize(
    "text", ["", 'a"\\', "\r\n\ndata: x", "\u2028\u2029\u0085\x0b\x0c\x1c", "é🎉", "\u0000", "</script>"]
)
def test_json_text_is_one_line_for_every_reader(text: str) -> None:
    encoded = json_text(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1


@pytest.mark.parametrize("usage_in_chunks", [False, True])
def test_chunk_from_the_template_equals_the_encoded_object(usage_in_chunks: bool) -> None:
    chunks = ChatFormat(ReplyHeader(response_id="1", model='a "model"', created=1, usage_in_chunks=usage_in_chunks))
    data = json.loads(chunks.text(ChoiceDelta(3, "x\n", None)).removeprefix(b"data: "))
    expected = json.loads(chunks.first(3).removeprefix(b"data: "))
    expected["choices"][0]["delta"] = {"content": "x\n"}
    assert data == expected and ("usage" in data) is usage_in_chunks
    counted = json.loads(chunks.text(ChoiceDelta(0, "x", None), UsageCount(1, 2, 1)).removeprefix(b"data: "))
    assert counted["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_seeds_are_derived_per_choice() -> None:
    def seeds(fields: str) -> list[int]:
        body = b'{"messages":[{"role":"user","content":"x"}],"n":3,"max_tokens":1' + fields.encode() + b"}"
        request = parse_chat(decode_body(body))
        (planned,) = plan_requests(request, [[1]], LIMITS)
        return [choice_seed(planned.sampling.seed, choice) for choice in range(3)]

    assert seeds(',"seed":5') == seeds(',"seed":5')
    assert seeds(',"seed":5')[0] == 5 and len(set(seeds(',"seed":5'))) == 3
    assert seeds(',"seed":6')[1] != seeds(',"seed":5')[1]
    assert seeds("") != seeds("")
    assert all(0 <= seed < 2**63 for seed in [*seeds(""), *seeds(',"seed":-1')])


def test_default_length_fits_into_the_remaining_context() -> None:
    request = parse_completion(decode_body(b'{"prompt":[1]}'))
    lengths = [plan_requests(request, [[1] * size], LIMITS)[0].sampling.max_tokens for size in (1, 84, 85, 99)]
    assert lengths == [16, 16, 15, 1]


def test_tiny_temperature_is_greedy() -> None:
    request = parse_completion(decode_body(b'{"prompt":[1],"temperature":1e-300}'))
    assert plan_requests(request, [[1]], LIMITS)[0].sampling.is_greedy


def test_settings_are_parsed() -> None:
    settings = load_settings(
        GatewaySettings, ["--model", "/m/name", "--max-model-len", "2k"], {}, prog="gateway"
    ).settings
    assert (settings.host, settings.port, model_options(settings)[0].name, settings.max_model_len) == (
        "127.0.0.1",
        8000,
        "name",
        2000,
    )
    (named,) = model_options(GatewaySettings(model=Path("/m/name"), served_model_name=("other", "alias")))
    assert (named.name, named.names) == ("other", ("other", "alias"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "Set exactly one of --model and --models-file"),
        (("--model", "/m", "--models-file", "FILE"), "Set exactly one of --model and --models-file"),
        (("--models-file", "FILE", "--served-model-name", "a"), "--served-model-name: expected no value"),
        (
            ("--models-file", "FILE"),
            f"tool_call_parser: expected one of {', '.join(TOOL_CALL_PARSERS)}; got 'x'",
        ),
    ],
)
def test_unservable_models_are_refused(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[[models]]\nmodel = "/a"\ntool_call_parser = "x"\n')
    argv = [str(path) if flag == "FILE" else flag for flag in flags]
    with pytest.raises(SettingsError) as refused:
        model_options(load_settings(GatewaySettings, argv, {}, prog="gateway").settings)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file or directory"), ("{% if %}", "Expected an expression")]
)
def test_chat_templates_are_checked_with_the_settings(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=f"--chat-template {path}: {message}"):
        model_options(GatewaySettings(model=Path("/m"), chat_template=path))


def test_models_file_entry_inherits_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        '[[models]]\nmodel = "/m/first"\n'
        '[[models]]\nmodel = "/m/x"\nnames = ["second"]\nmax_model_len = 8\nreasoning_parser = "none"\n'
        f'tool_call_parser = "mistral"\ngeneration_config = "auto"\nchat_template = "{tmp_path}/own.jinja"\n'
    )
    for name in ("all.jinja", "own.jinja"):
        (tmp_path / name).write_text("{{ messages }}")
    settings = GatewaySettings(
        models_file=path,
        max_model_len=64,
        reasoning_parser="qwen3",
        tool_call_parser="hermes",
        generation_config="vllm",
        chat_template=tmp_path / "all.jinja",
    )
    assert model_options(settings) == (
        ModelOptions(
            names=("first",), directory=Path("/m/first"), max_model_len=64, reasoning_parser="qwen3",
            tool_call_parser="hermes", generation_config="vllm", chat_template=tmp_path / "all.jinja",
        ),
        ModelOptions(
            names=("second",), directory=Path("/m/x"), max_model_len=8, reasoning_parser="none",
            tool_call_parser="mistral", generation_config="auto", chat_template=tmp_path / "own.jinja",
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "70000"],
        ["--max-num-queued-reqs", "0"],
        ["--max-model-len", "0"],
        ["--write-stall-seconds", "0"],
        ["--drain-seconds", "-1"],
        ["--no-worker", "hold"],
        ["--no-worker-wait-seconds", "0"],
    ],
)
def test_settings_error_names_the_flag(flags: list[str]) -> None:
    with pytest.raises(SettingsError, match=f"^{flags[0]}: expected "):
        load_settings(GatewaySettings, ["--model", "/m", *flags], {})
