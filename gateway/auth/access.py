"""Access to the gateway's routes: which key a request shows, and whose account it is charged to.

Without keys everybody may do everything but other sites' pages, and the gateway listens on loopback
only (see check_address). With keys every route but OPEN_ROUTES asks for one, unknown URLs too. The file of keys is read
again when it changes; one that cannot be read then leaves the keys as they were.

A gateway without keys answers whoever reaches it. Its port on 127.0.0.1 is reached by every page that a browser on this
machine shows: by a script's request (the answer is hidden from it, but the work is done), or, once the page's own name
has been made to point to 127.0.0.1 (DNS rebinding), with the answer too. Programs send none of what is looked at here.

    Sec-Fetch-Site   says whose page asks; browsers send it to 127.0.0.1 and localhost since 2023, no script can set it
    Origin           the same from older ones, with everything but plain GETs
    Host             the name in the page's address: a rebound one is a public name, which has a dot

A chat's way in, around every route. It knows no body and no model.
"""

import asyncio
import base64
import ipaddress
import logging
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.auth.api_keys import ApiKey, ApiKeysError, KeyRing, read_keys, single_key
from gateway.auth.rate_limits import Account
from gateway.errors import Forbidden, Unauthenticated

_OWN_SITES = ("same-origin", "none")  # none: typed, a bookmark
logger = logging.getLogger("gateway")
OPEN_ROUTES = frozenset(("/livez", "/readyz"))  # probes; they tell nothing but whether to send traffic here
RELOAD_SECONDS = 2.0
ACCOUNT = web.RequestKey("account", Account)


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


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access:
    def __init__(
        self,
        api_key: str = "",
        keys_file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        allowed_hosts: Iterable[str] = (),
    ) -> None:
        """`allowed_hosts`: further names that requests may call this server by while there are no keys.

        Raises ApiKeysError.
        """
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

    def admit(self, method: str, headers: Mapping[str, str]) -> Account:
        """Whose account a request is charged to. Raises Unauthenticated or Forbidden."""
        if self.needs_key:  # which no other site's page has
            return self.account(headers)
        check_host(headers, self._allowed_hosts)
        check_site(method, headers)
        return self._anonymous

    def account(self, headers: Mapping[str, str]) -> Account:
        """The account of the key that is shown. Raises Unauthenticated."""
        key = self._ring.find(_presented(headers))
        if key is None:
            raise Unauthenticated("A valid API key is needed: Authorization: Bearer KEY.")
        return self._known(self._accounts, key)

    def batch_account(self, owner_key_hash: str) -> Account | None:
        """The account of a key's batches: its limits once more, so that they do not shut out its requests.

        None: there is no such key, or no key any more.
        """
        key = next((key for key in self._ring.keys if key.sha256 == owner_key_hash), None)
        if key is None and (owner_key_hash or self.needs_key):
            return None
        return self._known(self._batch_accounts, key)

    def _known(self, accounts: dict[str, Account], key: ApiKey | None) -> Account:
        digest = key.sha256 if key else ""
        account = accounts.get(digest)
        if account is None or account.key != key:  # a key whose limits have changed begins anew
            account = accounts[digest] = Account(key, self._clock)
        if key is not None:
            account.store_ratio = self._ring.store_ratio(key)
            account.has_neighbors = len(self._ring.keys) > 1
        return account

    @property
    def has_file(self) -> bool:
        return self._keys_file is not None

    async def watch(self) -> None:
        """Reads the file again whenever it changes."""
        while self._keys_file is not None:
            await asyncio.sleep(RELOAD_SECONDS)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        state = self._state_of_file()
        if state == self._seen:
            return
        self._seen = state
        try:
            self._ring = self._read()
        except ApiKeysError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            valid = {key.sha256 for key in self._ring.keys}
            self._accounts = {digest: account for digest, account in self._accounts.items() if digest in valid}
            logger.info("read %d API keys", len(self._ring.keys))

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
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in OPEN_ROUTES:
            request[ACCOUNT] = access.admit(request.method, request.headers)
        return await handler(request)

    return middleware


def check_address(host: str, access: Access, *, allow_unauthenticated: bool) -> None:
    """Raises ApiKeysError where whoever reaches this machine could use the model."""
    if access.needs_key or allow_unauthenticated or _is_loopback(host):
        return
    raise ApiKeysError(
        f"--host {host} is open to others and no API key is set. Set PAGESTREAM_API_KEY or --api-keys-file, listen on "
        "127.0.0.1, or allow everybody in with --allow-unauthenticated."
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
    """The key of `Authorization: Bearer KEY` (OpenAI), `x-api-key: KEY` (Anthropic), or of HTTP Basic (browsers).

    Header bytes outside ASCII come from aiohttp as surrogates, which no key has.
    """
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "basic":
        key = _basic_password(key) if is_of_this_site(headers) else ""  # browsers add it for every site's scripts
    elif scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip().encode("utf-8", "surrogateescape")
