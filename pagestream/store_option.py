"""The option --redis-url of commands that work on a store: `dlq` and `queue`."""

import argparse

from pagestream.directories import state_directory
from pagestream.embedded_store import EmbeddedStore
from shared.store_address import store_url


def add_store_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis-url",
        default="",
        type=_url,
        metavar="URL",
        help="URL of the store; default: the embedded store of `pagestream serve`",
    )


def url_of(options: argparse.Namespace) -> str:
    """Return the URL of the chosen store."""
    return options.redis_url or EmbeddedStore.at(state_directory() / "store", 0).url


def _url(text: str) -> str:
    try:
        return store_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
