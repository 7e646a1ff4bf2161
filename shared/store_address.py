"""URLs of the store: a fixed address, or Sentinels that know the primary (sentinels.py). Without redis-py.

redis://, rediss://, unix://        a fixed address, which may be a proxy's; see redis-py's from_url()
redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT] ...]/SERVICE[/DATABASE][?OPTIONS]
rediss+sentinel://...               the same with TLS, to the Sentinels too

USER and PASSWORD are the store's. OPTIONS are redis-py's for the store's connections, and sentinel_username and
sentinel_password.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

SENTINEL_PORT = 26379
_SCHEMES = ("redis", "rediss", "unix")
_SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_SENTINEL_FORM = "redis+sentinel://[USER:PASSWORD@]HOST:PORT[,HOST:PORT ...]/SERVICE[/DATABASE]"


@dataclass(frozen=True, slots=True)
class SentinelService:
    """A store whose primary Sentinels know."""

    name: str
    hosts: tuple[tuple[str, int], ...]  # of the Sentinels
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)  # username and password for them


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """What the URL of a store says.

    Attributes:
        url: A URL for redis-py. With `service`, its host is that of a Sentinel, and only the rest is used.
        service: None if the address is fixed.
    """

    url: str = field(repr=False)
    service: SentinelService | None = None


def store_url(text: str) -> str:
    """Return the URL of a setting as it is.

    Raises:
        ValueError: If it is none of the forms above.
    """
    scheme = urlsplit(text).scheme
    if scheme not in _SCHEMES and scheme not in _SENTINEL_SCHEMES:
        expected = ", ".join(f"{each}://" for each in (*_SCHEMES, *_SENTINEL_SCHEMES))
        raise ValueError(f"expected a URL that begins with one of {expected}")
    _ = urlsplit(store_address(text).url).port  # raises if it is no port
    return text


def store_address(url: str) -> StoreAddress:
    """Return the parts of a URL.

    Raises:
        ValueError: If the address of a Sentinel or the service is missing or wrong.
    """
    parts = urlsplit(url)
    if parts.scheme not in _SENTINEL_SCHEMES:
        return StoreAddress(url)
    user, _, hosts = parts.netloc.rpartition("@")
    name, _, database = parts.path.strip("/").partition("/")
    if not name:
        raise ValueError(f"the service's name is missing; expected {_SENTINEL_FORM}")
    if database and not database.isdigit():  # redis-py would use database 0
        raise ValueError(f"database {database!r}: expected a number of 0 or more")
    options = dict(parse_qsl(parts.query))
    credentials = {
        word: options.pop(f"sentinel_{word}") for word in ("username", "password") if f"sentinel_{word}" in options
    }
    service = SentinelService(unquote(name), tuple(map(_sentinel_host, hosts.split(","))), credentials)
    host, port = service.hosts[0]
    netloc = f"{user}@" * bool(user) + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    scheme = _SENTINEL_SCHEMES[parts.scheme]
    return StoreAddress(SplitResult(scheme, netloc, f"/{database}", urlencode(options), "").geturl(), service)


def _sentinel_host(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port or SENTINEL_PORT
    except ValueError as error:
        raise ValueError(f"Sentinel {text!r}: {error}; expected HOST:PORT") from error
    if not host:
        raise ValueError(f"a Sentinel's host is missing; expected {_SENTINEL_FORM}")
    return host, port
