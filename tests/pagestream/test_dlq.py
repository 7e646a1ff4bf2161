"""`pagestream dlq` on a real server."""

import asyncio
import json
import re

import pytest

from pagestream import cli
from pagestream.dlq import main
from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import RedisScripts
from tests.conftest import Valkey
from tests.shared.test_dead_letters import kill_three_workers_with


@pytest.fixture
def options(valkey: Valkey) -> list[str]:
    async def fill() -> None:
        connections = connect(valkey.url)
        for request_id in ("one", "two"):
            await kill_three_workers_with(RedisScripts(connections.commands, RedisKeys("m")), request_id)
        await connections.aclose()
        await asyncio.sleep(0)  # closed transports report their end in the next loop iteration

    asyncio.run(fill())
    return ["--redis-url", valkey.url, "--served-model-name", "m"]


def test_dead_letters_are_listed_shown_retried_and_dropped(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["two", "one"]
    assert main(["show", "one", *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["attempts"], shown["request"]["num_prompt_tokens"]) == (3, 3)
    assert "prompt_token_ids" not in shown["request"]
    assert main(["show", "one", "--prompt", *options]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["prompt_token_ids"] == [7, 8, 9]
    assert main(["retry", "one", *options]) == 0
    assert re.fullmatch(r"one queued again as [0-9a-f]{32}\n", capsys.readouterr().out)
    assert main(["drop", "all", *options]) == 0
    assert capsys.readouterr().out == "two dropped\n"
    assert main(["list", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_unknown_dead_letter_is_named_in_the_error(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "none", *options]) == 1
    assert capsys.readouterr().err == "pagestream dlq: no dead letter of request none\n"
    assert main(["list", "--redis-url", "unix:///nowhere/s"]) == 1
    assert "/nowhere/s" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["dlq", "list"], ["queue", "clear", "m"]])
@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--redis-url", "127.0.0.1:6379", "expected a URL that begins with one of redis://"),
        ("--store-namespace", "a|b", "expected up to 64 letters"),
    ],
)
def test_wrong_store_option_is_named(
    command: list[str], option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, option, value])
    assert ended.value.code == 2
    assert f"argument {option}: {expected}" in capsys.readouterr().err
