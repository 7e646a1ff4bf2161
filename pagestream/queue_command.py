"""`pagestream queue clear MODEL`: end the waiting requests of a model, each with an error.

The store is the embedded one of `pagestream serve` unless --redis-url names another.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from redis.exceptions import RedisError

from pagestream.store_options import add_store_options, url_of
from shared.queue_clearing import clear_queue
from shared.redis_client import connect
from shared.redis_keys import RedisKeys


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    try:
        num_ended = asyncio.run(_clear(url_of(options), RedisKeys(options.model, options.store_namespace)))
    except (RedisError, OSError, ValueError) as error:
        sys.stderr.write(f"pagestream queue: {error}\n")
        return 1
    sys.stdout.write(f"{options.model}: ended {num_ended} waiting requests\n")
    return 0


async def _clear(url: str, keys: RedisKeys) -> int:
    connections = connect(url, hash_tag=keys.hash_tag)
    try:
        return await clear_queue(connections.commands, keys)
    finally:
        await connections.aclose()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagestream queue", description="The queues of a model.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="clear")
    clearing = actions.add_parser("clear", help="end all waiting requests, each with an error")
    clearing.add_argument("model", help="served model name")
    add_store_options(clearing)
    return parser
