"""`pagestream dlq list | show ID | retry ID | drop ID`: requests that repeatedly crashed their workers.

    list         one line each, newest first
    show ID      cause of the failure and the request; prompts are shown only with --prompt
    retry ID     queue it again from its start under a new id, which is printed
    drop ID      delete it; `all` instead of an id selects every one, here and for retry

The store is the embedded one of `pagestream serve` unless --redis-url names another.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from redis.exceptions import RedisError

from pagestream.demo_model import DEMO_MODEL_NAME
from pagestream.store_options import add_store_options, url_of
from shared.dead_letters import DeadLetter, DeadLetters, NoSuchLetter
from shared.messages import GenerationRequest
from shared.redis_client import connect
from shared.redis_keys import RedisKeys

ALL = "all"


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    try:
        asyncio.run(_run(options, url_of(options)))
    except (NoSuchLetter, RedisError, OSError, ValueError) as error:
        sys.stderr.write(f"pagestream dlq: {error}\n")
        return 1
    return 0


async def _run(options: argparse.Namespace, url: str) -> None:
    keys = RedisKeys(options.served_model_name, options.store_namespace)
    connections = connect(url, hash_tag=keys.hash_tag)
    letters = DeadLetters(connections.commands, keys)
    try:
        if options.action == "list":
            _print_list(await letters.list(), as_json=options.json)
        elif options.action == "show":
            letter = await letters.find(options.id)
            _print(_details(letter, await letters.request(letter), with_prompt=options.prompt))
        else:
            chosen = await letters.list() if options.id == ALL else [await letters.find(options.id)]
            await _act(letters, chosen, options.action)
    finally:
        await connections.aclose()


async def _act(letters: DeadLetters, chosen: Sequence[DeadLetter], action: str) -> None:
    for letter in chosen:
        if action == "retry":
            sys.stdout.write(f"{letter.request_id} queued again as {await letters.retry(letter)}\n")
        else:
            await letters.drop(letter)
            sys.stdout.write(f"{letter.request_id} dropped\n")


def _print_list(letters: Sequence[DeadLetter], *, as_json: bool) -> None:
    if as_json:
        _print([_summary(letter) for letter in letters])
        return
    for letter in letters:
        died = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(letter.died_at_unix_seconds))
        sys.stdout.write(f"{letter.request_id}  {died}  {letter.attempts} attempts  last on {letter.worker_id}\n")
    if not letters:
        sys.stderr.write("no dead letters\n")


def _summary(letter: DeadLetter) -> dict[str, Any]:
    return {
        "request_id": letter.request_id,
        "died_at_unix_seconds": letter.died_at_unix_seconds,
        "worker_id": letter.worker_id,
        "attempts": letter.attempts,
        "strikes": letter.strikes,
        "journal_bytes": letter.journal_bytes,
    }


def _details(letter: DeadLetter, request: GenerationRequest, *, with_prompt: bool) -> dict[str, Any]:
    asked = msgspec.to_builtins(request)
    token_ids = asked.pop("prompt_token_ids")
    asked["num_prompt_tokens"] = len(token_ids)
    if with_prompt:
        asked["prompt_token_ids"] = token_ids
    return _summary(letter) | {"request": asked}


def _print(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagestream dlq", description="Requests that repeatedly crashed their workers."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|retry|drop")
    listing = actions.add_parser("list", help="one line each, newest first")
    listing.add_argument("--json", action="store_true", help="print JSON")
    showing = actions.add_parser("show", help="cause of the failure and the request")
    showing.add_argument("--prompt", action="store_true", help="include the prompt's token ids")
    retrying = actions.add_parser("retry", help="queue it again under a new id")
    dropping = actions.add_parser("drop", help="delete it")
    for action in (showing, retrying, dropping):
        action.add_argument("id", help="request id" + ("" if action is showing else f", or `{ALL}`"))
    for action in (listing, showing, retrying, dropping):
        add_store_options(action)
        action.add_argument(
            "--served-model-name", default=DEMO_MODEL_NAME, metavar="NAME", help="model (default: %(default)s)"
        )
    return parser
