"""Which requests a browser sent on behalf of another site, and under which names this gateway may be called. Pure.

A gateway without keys answers whoever reaches it. Its port on 127.0.0.1 is reached by every page that a browser on this
machine shows: by a script's request (the answer is hidden from it, but the work is done), or, once the page's own name
has been made to point to 127.0.0.1 (DNS rebinding), with the answer too. Programs send none of what is looked at here.

    Sec-Fetch-Site   says whose page asks; browsers send it to 127.0.0.1 and localhost since 2023, no script can set it
    Origin           the same from older ones, with everything but plain GETs
    Host             the name in the page's address: a rebound one is a public name, which has a dot
"""

import ipaddress
import urllib.parse
from collections.abc import Mapping

from gateway.errors import Forbidden

_OWN_SITES = ("same-origin", "none")  # none: typed, a bookmark


def check_host(headers: Mapping[str, str], allowed_hosts: frozenset[str]) -> None:
    """Raises Forbidden for a name that a stranger could have registered."""
    name = _host_name(headers.get("Host", ""))
    if name in allowed_hosts or _is_address(name) or "." not in name.removesuffix(".localhost"):
        return
    raise Forbidden(
        f"Host: {name[:100]!r} is no name of this server; without API keys it answers to addresses, to names without "
        "a dot, and to those of --allowed-hosts.",
        code="host_not_allowed",
    )


def check_site(method: str, headers: Mapping[str, str]) -> None:
    """Raises Forbidden for what another site's page has a browser send."""
    site = headers.get("Sec-Fetch-Site")
    is_ours = is_of_this_site(headers) if site is None else site in _OWN_SITES or _opens_a_page(method, headers)
    if not is_ours:
        raise Forbidden("Without API keys this server takes nothing that another site's page sends.")


def is_of_this_site(headers: Mapping[str, str]) -> bool:
    """By the Origin, which browsers send and programs do not."""
    origin = headers.get("Origin")
    try:
        return origin is None or urllib.parse.urlsplit(origin).netloc.lower() == headers.get("Host", "").lower()
    except ValueError:
        return False  # no URL at all, such as "http://["


def _opens_a_page(method: str, headers: Mapping[str, str]) -> bool:
    """A link that somebody follows: the page opens in a tab, where the linking site sees nothing of it."""
    return (
        method == "GET" and headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
    )


def _host_name(host: str) -> str:
    """Without the port and the brackets of an IPv6 address; empty if there is none, or what is no host."""
    try:
        return (urllib.parse.urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return "."  # no name at all: not allowed


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
