"""The options of commands that work on a store: `dlq` and `queue`."""

import argparse
from collections.abc import Callable

from pagestream.directories import state_directory
from pagestream.embedded_store import EmbeddedStore
from shared.redis_keys import store_namespace
from shared.store_address import store_url


def add_store_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis-url",
        default="",
        type=_checked(store_url),
        metavar="URL",
        help="URL of the store; default: the embedded store of `pagestream serve`",
    )
    parser.add_argument(
        "--store-namespace",
        default="",
        type=_checked(store_namespace),
        metavar="NAME",
        help="namespace of the server, if it has one",
    )


def url_of(options: argparse.Namespace) -> str:
    """Return the URL of the chosen store."""
    return options.redis_url or EmbeddedStore.at(state_directory() / "store", 0).url


def _checked(parse: Callable[[str], str]) -> Callable[[str], str]:
    """Return `parse` for argparse, which shows the text of its own error only."""

    def checked(text: str) -> str:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked
