"""The options of commands that work on a store: `dlq` and `queue`."""

import argparse

from pagestream.directories import state_directory
from pagestream.embedded_store import EmbeddedStore
from shared.redis_keys import RedisKeys, store_namespace
from shared.store_address import store_url


def add_store_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis-url",
        default="",
        type=_url,
        metavar="URL",
        help="URL of the store; default: the embedded store of `pagestream serve`",
    )
    parser.add_argument("--store-namespace", default="", metavar="NAME", help="namespace of the server, if it has one")


def keys_of(options: argparse.Namespace, model_name: str) -> RedisKeys:
    """Return the names of a model in the store. Raises ValueError."""
    return RedisKeys(model_name, store_namespace(options.store_namespace))


def url_of(options: argparse.Namespace) -> str:
    """Return the URL of the chosen store."""
    return options.redis_url or EmbeddedStore.at(state_directory() / "store", 0).url


def _url(text: str) -> str:
    try:
        return store_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
