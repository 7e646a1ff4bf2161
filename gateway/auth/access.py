"""Access to the gateway's routes: checks the API key of a request and returns the account that is charged.

With keys, every route except OPEN_ROUTES and those of --open-routes needs one, unknown URLs too. The file of keys is
reloaded when it changes; if it cannot be read, the old keys stay valid. Without keys the gateway listens only on
loopback (check_address), and these headers, which browsers send and programs do not, keep out pages of other sites,
including DNS rebinding:

    Sec-Fetch-Site   the site of the requesting page; browsers send it since 2023, and no script can set it
    Origin           the same from older browsers, on all requests except plain GETs
    Host             the host name of the page's address; a rebound one is a public name, which has a dot
"""

import asyncio
import base64
import ipaddress
import logging
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.auth.api_keys import ApiKey, ApiKeysError, KeyRing, read_keys, single_key
from gateway.auth.rate_limits import Account
from gateway.errors import Forbidden, Unauthenticated

_OWN_SITES = ("same-origin", "none")  # none: a typed address or a bookmark
logger = logging.getLogger("gateway")
OPEN_ROUTES = frozenset(("/livez", "/readyz"))  # probes, which reveal only whether to send traffic
RELOAD_SECONDS = 2.0
ACCOUNT = web.RequestKey("account", Account)


def check_host(headers: Mapping[str, str], allowed_hosts: frozenset[str]) -> None:
    """Raise Forbidden if the Host is a public name, which DNS rebinding could use."""
    name = _host_name(headers.get("Host", ""))
    if name in allowed_hosts or _is_address(name) or "." not in name.removesuffix(".localhost"):
        return
    raise Forbidden(
        f"Host {name[:100]!r} is not allowed. Without API keys, use an IP address, a name without a dot, or a name of "
        "--allowed-hosts.",
        code="host_not_allowed",
    )


def check_site(method: str, headers: Mapping[str, str]) -> None:
    """Raise Forbidden for a request that a page of another site made a browser send."""
    site = headers.get("Sec-Fetch-Site")
    is_ours = is_of_this_site(headers) if site is None else site in _OWN_SITES or _opens_a_page(method, headers)
    if not is_ours:
        raise Forbidden("Cross-site requests are not allowed without API keys.")


def is_of_this_site(headers: Mapping[str, str]) -> bool:
    """Return whether the Origin is this server, or absent: programs send none."""
    origin = headers.get("Origin")
    try:
        return origin is None or urllib.parse.urlsplit(origin).netloc.lower() == headers.get("Host", "").lower()
    except ValueError:
        return False  # not a URL, such as "http://["


def _opens_a_page(method: str, headers: Mapping[str, str]) -> bool:
    """Return whether a link opens the page in a tab, where the linking site cannot read it."""
    return (
        method == "GET" and headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
    )


def _host_name(host: str) -> str:
    """Return the host without port and IPv6 brackets; "" if absent, "." if it is not a host."""
    try:
        return (urllib.parse.urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return "."  # check_host() refuses it


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Access:
    """The valid API keys and their accounts."""

    def __init__(
        self,
        api_key: str = "",
        keys_file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        allowed_hosts: Iterable[str] = (),
        open_routes: Iterable[str] = (),
    ) -> None:
        """Read the keys.

        Args:
            api_key: The key of --api-key; "": none.
            keys_file: The file of --api-keys-file.
            clock: For rate limits, in seconds.
            allowed_hosts: Additional Host names that are allowed without keys.
            open_routes: Routes that need no key, besides OPEN_ROUTES.

        Raises:
            ApiKeysError: If the keys cannot be used.
        """
        self._open_routes = frozenset(open_routes)
        self._allowed_hosts = frozenset(name.lower() for name in allowed_hosts)
        self._fixed = [single_key(api_key)] if api_key else []
        self._keys_file = keys_file
        self._clock = clock
        self._anonymous = Account(None, clock)
        self._accounts: dict[str, Account] = {}  # by digest
        self._batch_accounts: dict[str, Account] = {}
        self._seen = self._state_of_file()
        self._ring = self._read()

    @property
    def needs_key(self) -> bool:
        return bool(self._fixed) or self._keys_file is not None

    def admit(self, method: str, headers: Mapping[str, str], route: str = "") -> Account:
        """Return the account that a request is charged to.

        Args:
            method: Its method.
            headers: Its headers.
            route: Its route, or "" for an unknown URL.

        Raises:
            Unauthenticated: If it has no valid key.
            Forbidden: If there are no keys, and it comes from another site or names a public host.
        """
        if self.needs_key and route in self._open_routes:
            return self._anonymous
        if self.needs_key:  # pages of other sites do not have it
            return self.account(headers)
        check_host(headers, self._allowed_hosts)
        check_site(method, headers)
        return self._anonymous

    def account(self, headers: Mapping[str, str]) -> Account:
        """Return the account of the key in the headers. Raises Unauthenticated."""
        key = self._ring.find(_presented(headers))
        if key is None:
            raise Unauthenticated("A valid API key is required: Authorization: Bearer KEY.")
        return self._known(self._accounts, key)

    def accounts(self) -> list[Account]:
        """Return the accounts of the keys that have sent a request."""
        return list(self._accounts.values())

    def batch_account(self, owner_key_hash: str) -> Account | None:
        """Return the account of a key's batches: a second budget, so that batches do not use up that of its requests.

        Returns None if the key does not exist, or no longer exists.
        """
        key = next((key for key in self._ring.keys if key.sha256 == owner_key_hash), None)
        if key is None and (owner_key_hash or self.needs_key):
            return None
        return self._known(self._batch_accounts, key)

    def _known(self, accounts: dict[str, Account], key: ApiKey | None) -> Account:
        digest = key.sha256 if key else ""
        account = accounts.get(digest)
        if account is None or account.key != key:  # changed limits start with a full budget
            account = accounts[digest] = Account(key, self._clock)
        if key is not None:
            account.store_ratio = self._ring.store_ratio(key)
            account.has_neighbors = len(self._ring.keys) > 1
        return account

    @property
    def has_file(self) -> bool:
        return self._keys_file is not None

    async def watch(self) -> None:
        """Reload the file whenever it changes."""
        while self._keys_file is not None:
            await asyncio.sleep(RELOAD_SECONDS)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Reload the file if it changed. On an error the old keys stay valid."""
        state = self._state_of_file()
        if state == self._seen:
            return
        self._seen = state
        try:
            self._ring = self._read()
        except ApiKeysError as error:
            logger.error("API keys: reload failed; the old keys stay valid: %s", error)
        else:
            valid = {key.sha256 for key in self._ring.keys}
            self._accounts = {digest: account for digest, account in self._accounts.items() if digest in valid}
            logger.info("API keys: loaded %d", len(self._ring.keys))

    def _read(self) -> KeyRing:
        keys: list[ApiKey] = list(self._fixed)
        if self._keys_file is not None:
            keys += read_keys(self._keys_file)
        return KeyRing(keys)

    def _state_of_file(self) -> tuple[int, int, int] | None:
        if self._keys_file is None:
            return None
        try:
            status = self._keys_file.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


def authenticate(access: Access) -> Middleware:
    """Return the middleware that sets request[ACCOUNT]."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in OPEN_ROUTES:
            request[ACCOUNT] = access.admit(request.method, request.headers, resource.canonical if resource else "")
        return await handler(request)

    return middleware


def check_address(host: str, access: Access, *, allow_unauthenticated: bool) -> None:
    """Raise ApiKeysError if the gateway would listen beyond loopback without API keys."""
    if access.needs_key or allow_unauthenticated or _is_loopback(host):
        return
    raise ApiKeysError(
        f"--host {host} is not a loopback address, and no API key is set. Set PAGESTREAM_API_KEY or --api-keys-file, "
        "use --host 127.0.0.1, or set --allow-unauthenticated."
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _basic_password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode("utf-8", "surrogateescape").partition(":")[2]
    except ValueError:
        return ""


def _presented(headers: Mapping[str, str]) -> bytes:
    """Return the key of `Authorization: Bearer KEY` (OpenAI), `x-api-key: KEY` (Anthropic), or HTTP Basic (browsers).

    aiohttp decodes header bytes outside ASCII as surrogates, which no key has.
    """
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "basic":
        key = _basic_password(key) if is_of_this_site(headers) else ""  # browsers add it to cross-site requests too
    elif scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip().encode("utf-8", "surrogateescape")
