"""URLs of the store: a fixed address, Sentinels (sentinels.py), or a cluster (cluster_nodes.py). Without redis-py.

redis://, rediss://, unix://        a fixed address, which may be a proxy's; see redis-py's from_url()
redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT] ...]/SERVICE[/DATABASE][?OPTIONS]
redis+cluster://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT] ...][?OPTIONS]
rediss+sentinel://, rediss+cluster://   the same with TLS, to the Sentinels too

USER and PASSWORD are the store's. OPTIONS are redis-py's for the store's connections, and sentinel_username and
sentinel_password.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

Host = tuple[str, int]  # with its port

STORE_PORT, SENTINEL_PORT = 6379, 26379
_SCHEMES = ("redis", "rediss", "unix")
_SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_CLUSTER_SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
_SENTINEL_FORM = "redis+sentinel://[USER:PASSWORD@]HOST:PORT[,HOST:PORT ...]/SERVICE[/DATABASE]"
_CLUSTER_FORM = "redis+cluster://[USER:PASSWORD@]HOST:PORT[,HOST:PORT ...]"


@dataclass(frozen=True, slots=True)
class SentinelService:
    """A store whose primary Sentinels know."""

    name: str
    hosts: tuple[Host, ...]  # of the Sentinels
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)  # username and password for them


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """What the URL of a store says.

    Attributes:
        url: A URL for redis-py. With `service` or `nodes`, only its host is not the store's.
        service: Whose Sentinels know the primary; None: another form.
        nodes: Some nodes of a cluster; empty: another form.
    """

    url: str = field(repr=False)
    service: SentinelService | None = None
    nodes: tuple[Host, ...] = ()


def store_url(text: str) -> str:
    """Return the URL of a setting as it is.

    Raises:
        ValueError: If it is none of the forms above.
    """
    schemes = (*_SCHEMES, *_SENTINEL_SCHEMES, *_CLUSTER_SCHEMES)
    if urlsplit(text).scheme not in schemes:
        expected = ", ".join(f"{each}://" for each in schemes)
        raise ValueError(f"expected a URL that begins with one of {expected}")
    _ = urlsplit(store_address(text).url).port  # raises if it is no port
    return text


def store_address(url: str) -> StoreAddress:
    """Return the parts of a URL.

    Raises:
        ValueError: If an address, the service or the database is missing or wrong.
    """
    parts = urlsplit(url)
    if parts.scheme in _SENTINEL_SCHEMES:
        return _of_sentinels(parts)
    return _of_cluster(parts) if parts.scheme in _CLUSTER_SCHEMES else StoreAddress(url)


def _of_sentinels(parts: SplitResult) -> StoreAddress:
    name, _, database = parts.path.strip("/").partition("/")
    if not name:
        raise ValueError(f"the service's name is missing; expected {_SENTINEL_FORM}")
    if database and not database.isdigit():  # redis-py would use database 0
        raise ValueError(f"database {database!r}: expected a number of 0 or more")
    options = dict(parse_qsl(parts.query))
    credentials = {
        word: options.pop(f"sentinel_{word}") for word in ("username", "password") if f"sentinel_{word}" in options
    }
    hosts = _hosts(parts, "Sentinel", SENTINEL_PORT, _SENTINEL_FORM)
    service = SentinelService(unquote(name), hosts, credentials)
    return StoreAddress(_url_at(hosts[0], parts, _SENTINEL_SCHEMES, f"/{database}", urlencode(options)), service)


def _of_cluster(parts: SplitResult) -> StoreAddress:
    if parts.path.strip("/") not in ("", "0"):
        raise ValueError(f"a cluster has database 0 alone; expected {_CLUSTER_FORM}")
    hosts = _hosts(parts, "node", STORE_PORT, _CLUSTER_FORM)
    return StoreAddress(_url_at(hosts[0], parts, _CLUSTER_SCHEMES, "", parts.query), nodes=hosts)


def _url_at(host: Host, parts: SplitResult, schemes: Mapping[str, str], path: str, query: str) -> str:
    user = parts.netloc.rpartition("@")[0]
    name, port = host
    netloc = f"{user}@" * bool(user) + (f"[{name}]:{port}" if ":" in name else f"{name}:{port}")
    return SplitResult(schemes[parts.scheme], netloc, path, query, "").geturl()


def _hosts(parts: SplitResult, what: str, default_port: int, form: str) -> tuple[Host, ...]:
    return tuple(_host(text, what, default_port, form) for text in parts.netloc.rpartition("@")[2].split(","))


def _host(text: str, what: str, default_port: int, form: str) -> Host:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port or default_port
    except ValueError as error:
        raise ValueError(f"{what} {text!r}: {error}; expected HOST:PORT") from error
    if not host:
        raise ValueError(f"a {what}'s host is missing; expected {form}")
    return host, port
