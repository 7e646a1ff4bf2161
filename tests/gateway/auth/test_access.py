"""API keys: authentication, rate limits, and a key on every route except the probes."""

import base64
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.auth.access import OPEN_ROUTES, Access, check_address
from gateway.auth.api_keys import ApiKey, ApiKeysError, KeyRing, digest_of, read_keys, single_key
from gateway.auth.rate_limits import CHARGE_SECONDS, Account, TokenBucket
from gateway.errors import RateLimited, Unauthenticated
from gateway.pipeline.submission import OPEN_OUTPUT_TOKENS
from gateway.settings import OPENABLE_ROUTES, GatewaySettings
from shared.redis_keys import PRIORITY_CLASSES
from shared.settings import SettingsError
from tests.gateway.conftest import Gateway
from tests.gateway.fake_inference import says

KEY = "ps-0123456789abcdef"
OTHER = "ps-fedcba9876543210"
PROMPT = {"prompt": "the capital of France", "max_tokens": 4}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def basic(text: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(text.encode()).decode()}


def entry(name: str, key: str, **limits: int) -> str:
    lines = [f'name = "{name}"', f'sha256 = "{digest_of(key.encode())}"', *(f"{k} = {v}" for k, v in limits.items())]
    return "\n".join(["[[keys]]", *lines, ""])


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(entry("team-a", KEY))
    return path


class TestKeys:
    def test_key_is_found_by_its_digest(self) -> None:
        ring = KeyRing([single_key(KEY), ApiKey(name="b", sha256=digest_of(OTHER.encode()))])
        assert [key.name if (key := ring.find(shown)) else None for shown in (KEY.encode(), OTHER.encode())] == [
            "default",
            "b",
        ]

    @pytest.mark.parametrize("shown", [b"", b"x", KEY.encode()[:-1], KEY.encode() + b" ", b"k" * 257, b"\xff\xfe"])
    def test_other_credentials_find_no_account(self, shown: bytes) -> None:
        assert KeyRing([single_key(KEY)]).find(shown) is None

    def test_key_lookup_compares_every_digest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compared: list[str] = []

        def compare(one: str, other: str) -> bool:
            compared.append(one)
            return one == other

        monkeypatch.setattr("hmac.compare_digest", compare)
        keys = [ApiKey(name=name, sha256=digest_of(name.encode())) for name in ("a", "b", "c")]
        for shown in (b"a", b"c", b"nobody"):
            compared.clear()
            KeyRing(keys).find(shown)
            assert compared == [key.sha256 for key in keys]  # whole digests, and all of them

    @pytest.mark.parametrize("key", ["changeme", "short", "k" * 257, "your-api-key-here"])
    def test_guessable_key_is_refused(self, key: str) -> None:
        with pytest.raises(ApiKeysError):
            single_key(key)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "missing required field `keys`"),
            ("keys = []", "expected at least one"),
            ("[[keys]]\nname = 'a'\n", "sha256"),
            ("[[keys]]\nname = 'a b'\nsha256 = '" + "0" * 64 + "'\n", "expected 1 to 64 letters"),
            ("[[keys]]\nname = 'a'\nsha256 = 'abc'\n", "64 lowercase hexadecimal digits"),
            ("[[keys]]\nname = 'a'\nsha256 = '" + "0" * 64 + "'\nmax_concurent = 1\n", "unknown field `max_concurent`"),
            ("[[keys]]\nname = 'a'\nsha256 = '" + "0" * 64 + "'\nmax_concurrent = 0\n", "max_concurrent"),
            *(
                ("[[keys]]\nname = 'a'\nsha256 = '" + "0" * 64 + f"'\nweight = {weight}\n", f"{bound}.*weight")
                for weight, bound in (("0", ">= 0.01"), ("-1.0", ">= 0.01"), ("1e9", "<= 100"), ("inf", "<= 100"))
            ),
            ("not toml", "keys.toml"),
        ],
    )
    def test_unusable_keys_file_is_named(self, tmp_path: Path, text: str, says: str) -> None:
        path = tmp_path / "keys.toml"
        path.write_text(text)
        with pytest.raises(ApiKeysError, match=says.replace("[", r"\[")):
            read_keys(path)

    def test_duplicate_key_entries_are_refused(self) -> None:
        with pytest.raises(ApiKeysError, match="same sha256"):
            KeyRing([ApiKey(name="a", sha256="0" * 64), ApiKey(name="b", sha256="0" * 64)])


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def refusal(account: Account) -> tuple[str, int] | None:
    """Return code and Retry-After of a refused generation request, or None if it is admitted."""
    try:
        account.begin(generates=True)
    except RateLimited as error:
        return error.code, error.retry_after_seconds
    return None


class TestLimits:
    def test_bucket_refills_evenly_up_to_one_minute(self) -> None:
        bucket = TokenBucket(60, now=0.0)
        bucket.take(90, now=0.0)  # into debt
        assert bucket.seconds_until(1, now=0.0) == 31.0
        assert bucket.seconds_until(1, now=31.0) == 0.0
        assert bucket.seconds_until(60, now=1000.0) == 0.0
        assert bucket.seconds_until(61, now=2000.0) == 1.0  # the bucket holds one minute at most

    def test_each_limit_names_itself_and_retry_after(self) -> None:
        clock = Clock()
        account = Account(ApiKey(name="a", sha256="0" * 64, requests_per_minute=1, tokens_per_minute=60), clock)
        account.begin(generates=True)
        assert refusal(account) == ("requests_per_minute_exceeded", 60)
        account = Account(ApiKey(name="a", sha256="0" * 64, tokens_per_minute=60), clock)
        account.begin(generates=True)
        account.spend(70)
        assert refusal(account) == ("tokens_per_minute_exceeded", 11)
        clock.now = 11.0
        account.begin(generates=True)

    def test_debt_forbids_only_requests_that_cost_tokens(self) -> None:
        account = Account(ApiKey(name="a", sha256="0" * 64, tokens_per_minute=60), Clock())
        account.spend(61)
        account.begin(generates=False)
        with pytest.raises(RateLimited):
            account.check_debt()

    def test_max_concurrent_refuses_no_request(self) -> None:
        """The scheduler keeps the sequences above the limit waiting."""
        account = Account(ApiKey(name="a", sha256="0" * 64, max_concurrent=1), Clock())
        for _ in range(3):
            account.begin(generates=True)
        assert account.max_running == 1


class TestTokenCharges:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def account(self, clock: Clock) -> Account:
        return Account(ApiKey(name="a", sha256="0" * 64, tokens_per_minute=60_000), clock)

    def test_reserve_is_capped_at_the_bucket_size(self, account: Account) -> None:
        account.reserve(100, 32 * 2 * 1_500, lambda: 100)
        assert refusal(account) is not None
        account = Account(account.key, lambda: 0.0)
        account.reserve(100, 59_000, lambda: 100)
        account.reserve(50, 10_000, lambda: 50)
        assert refusal(account) is not None

    def test_unused_reserve_is_returned(self, account: Account) -> None:
        charge = account.reserve(100, 59_900, lambda: 400)
        assert charge is not None
        assert refusal(account) is not None
        charge.settle()
        account.reserve(100, 59_500, lambda: 400)  # 60,000 minus 400

    def test_output_above_the_reserve_is_charged_while_running(self, account: Account, clock: Clock) -> None:
        used = 100
        account.reserve(100, 1_024, lambda: used)
        used = 61_000
        clock.now = CHARGE_SECONDS
        assert refusal(account) is not None
        clock.now += 60.0
        used = 122_000
        assert refusal(account) is not None

    def test_end_charges_the_total_usage(self, account: Account, clock: Clock) -> None:
        used = 100
        charge = account.reserve(100, 10, lambda: used)
        assert charge is not None
        used = 61_000
        clock.now = CHARGE_SECONDS
        assert refusal(account) == ("tokens_per_minute_exceeded", 1)
        charge.settle()
        assert refusal(account) is not None
        clock.now += 1.0  # 1,000 tokens
        assert refusal(account) is None

    def test_answers_without_max_tokens_run_concurrently(self, account: Account) -> None:
        charges = [account.reserve(50, OPEN_OUTPUT_TOKENS, lambda: 350) for _ in range(50)]
        assert refusal(account) is None
        for charge in charges:
            assert charge is not None
            charge.settle()
        account.reserve(0, 60_000 - 50 * 350 - 1, lambda: 0)
        assert refusal(account) is None

    def test_key_without_token_limit_has_no_charge(self) -> None:
        account = Account(ApiKey(name="a", sha256="0" * 64), Clock())
        assert account.reserve(10**6, 10**6, lambda: 0) is None


class TestClasses:
    def test_class_above_the_maximum_of_the_key_is_lowered(self) -> None:
        low = Account(ApiKey(name="a", sha256="0" * 64, highest_priority_class="batch"), lambda: 0.0)
        high = Account(ApiKey(name="b", sha256="1" * 64), lambda: 0.0)
        assert [low.priority_class(asked) for asked in PRIORITY_CLASSES] == ["batch", "batch"]
        assert [high.priority_class(asked) for asked in PRIORITY_CLASSES] == ["interactive", "batch"]


class TestReload:
    def test_changed_file_is_reloaded_and_a_broken_one_ignored(self, keys_file: Path) -> None:
        access = Access(keys_file=keys_file)
        account = access.account(bearer(KEY))
        keys_file.write_text("broken")
        access.reload_if_changed()
        assert access.account(bearer(KEY)) is account
        keys_file.write_text(entry("team-a", KEY) + entry("team-b", OTHER, max_concurrent=1))
        access.reload_if_changed()
        assert access.account(bearer(KEY)) is account  # its usage is kept
        assert access.account(bearer(OTHER)).tenant == "team-b"
        keys_file.write_text(entry("team-b", OTHER))
        access.reload_if_changed()
        with pytest.raises(Unauthenticated):
            access.account(bearer(KEY))

    def test_keys_share_the_store_and_a_lone_key_gets_all(self, keys_file: Path) -> None:
        access = Access(keys_file=keys_file)
        assert access.account(bearer(KEY)).store_ratio == 1
        keys_file.write_text(entry("team-a", KEY) + entry("team-b", OTHER) + "store_ratio = 0.5\n")
        access.reload_if_changed()
        accounts = [access.account(bearer(key)) for key in (KEY, OTHER)]
        assert [account.store_ratio for account in accounts] == [1 / 3, 0.5]
        batches = access.batch_account(digest_of(KEY.encode()))
        assert batches is not None and batches.store_ratio == 1 / 3

    def test_missing_keys_file_stops_only_the_start(self, keys_file: Path) -> None:
        access = Access(keys_file=keys_file)
        os.unlink(keys_file)
        access.reload_if_changed()
        assert access.account(bearer(KEY)).tenant == "team-a"
        with pytest.raises(ApiKeysError, match="No such file"):
            Access(keys_file=keys_file)


class TestAddress:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gateway.example"])
    def test_address_beyond_loopback_requires_a_key(self, host: str) -> None:
        with pytest.raises(ApiKeysError, match="PAGESTREAM_API_KEY"):
            check_address(host, Access(), allow_unauthenticated=False)
        check_address(host, Access(), allow_unauthenticated=True)
        check_address(host, Access(KEY), allow_unauthenticated=False)

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
    def test_loopback_address_requires_no_key(self, host: str) -> None:
        check_address(host, Access(), allow_unauthenticated=False)


class TestRoutes:
    async def test_every_route_except_probes_requires_a_key(self, start_gateway: Callable[..., Any]) -> None:
        gateway: Gateway = await start_gateway(api_key=KEY)
        seen = set()
        for method, path in gateway.routes:
            url = path.replace("{id}", "x").replace("{id:.+}", "x")
            async with gateway.session.request(method, url) as response:
                is_open = response.status != 401
            seen.add(path)
            assert is_open == (path in OPEN_ROUTES), f"{method} {path}"
        assert seen > OPEN_ROUTES

    async def test_opened_routes_require_no_key(self, start_gateway: Callable[..., Any]) -> None:
        opened = ("/health", "/metrics")
        gateway: Gateway = await start_gateway(api_key=KEY, open_routes=opened)
        for path in OPENABLE_ROUTES:
            async with gateway.session.get(path) as response:
                assert response.status == (200 if path in opened else 401), path
        async with gateway.session.get("/v1/models") as response:
            assert response.status == 401
        with pytest.raises(SettingsError, match="--open-routes: expected routes of /health"):
            GatewaySettings(model=Path("m"), open_routes=("/v1/models",))

    @pytest.mark.parametrize("headers", [
        {}, bearer(""), bearer(KEY + "x"), {"Authorization": f"Basic {KEY}"}, {"Authorization": KEY},
        basic(KEY), basic(":wrong-key-wrong-key"), {"Authorization": "Basic ===="},
        {"x-api-key": "wrong-key-wrong-key"}, {"Authorization": "Bearer käse"},
    ])  # fmt: skip
    async def test_request_without_key_is_not_answered(
        self, start_gateway: Callable[..., Any], headers: dict[str, str]
    ) -> None:
        gateway: Gateway = await start_gateway(api_key=KEY)
        for path in ("/v1/completions", "/nowhere"):
            async with gateway.session.post(path, json=PROMPT, headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == 'Bearer, Basic realm="pagestream"'
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        assert gateway.engine.requests == []

    @pytest.mark.parametrize(
        "headers", [bearer(KEY), {"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}, basic(f"anybody:{KEY}")]
    )
    async def test_key_sets_the_tenant(
        self, start_gateway: Callable[..., Any], keys_file: Path, headers: dict[str, str]
    ) -> None:
        gateway: Gateway = await start_gateway(api_keys_file=keys_file)
        gateway.engine.script = says([5], [6])
        async with gateway.session.post("/v1/completions", json=PROMPT, headers=headers) as response:
            assert response.status == 200
        assert [request.tenant for request in gateway.engine.requests] == ["team-a"]

    @pytest.mark.parametrize(
        ("origin", "status"), [("http://{host}", 200), ("http://other.example", 401), ("null", 401)]
    )
    async def test_cross_site_request_with_browser_password_is_refused(
        self, start_gateway: Callable[..., Any], origin: str, status: int
    ) -> None:
        gateway: Gateway = await start_gateway(api_key=KEY)
        gateway.engine.script = says([5])
        host = f"127.0.0.1:{gateway.port}"
        headers = basic(f":{KEY}") | {"Origin": origin.format(host=host)}
        async with gateway.session.post("/v1/completions", json=PROMPT, headers=headers) as response:
            assert response.status == status
        async with gateway.session.post(
            "/v1/completions", json=PROMPT, headers=bearer(KEY) | {"Origin": "http://other.example"}
        ) as response:
            assert response.status == 200  # a script that sends the key itself was given it

    async def test_key_limits_the_priority_class(self, start_gateway: Callable[..., Any], tmp_path: Path) -> None:
        path = tmp_path / "keys.toml"
        path.write_text(entry("a", KEY) + 'highest_priority_class = "batch"\n' + entry("b", OTHER))
        gateway: Gateway = await start_gateway(api_keys_file=path)
        gateway.engine.script = says([5])
        for key in (KEY, OTHER):
            async with gateway.session.post("/v1/completions", json=PROMPT, headers=bearer(key)) as response:
                assert response.status == 200
        assert [request.priority_class for request in gateway.engine.requests] == ["batch", "interactive"]

    async def test_key_over_its_limit_does_not_affect_other_keys(
        self, start_gateway: Callable[..., Any], tmp_path: Path
    ) -> None:
        path = tmp_path / "keys.toml"
        path.write_text(entry("a", KEY, requests_per_minute=1) + entry("b", OTHER))
        gateway: Gateway = await start_gateway(api_keys_file=path)
        gateway.engine.script = says([5])
        statuses = []
        for key in (KEY, KEY, OTHER):
            async with gateway.session.post("/v1/completions", json=PROMPT, headers=bearer(key)) as response:
                statuses.append(response.status)
                if response.status == 429:
                    assert 1 <= int(response.headers["Retry-After"]) <= 60
                    assert (await response.json())["error"]["code"] == "requests_per_minute_exceeded"
        assert statuses == [200, 429, 200]
        assert len(gateway.engine.requests) == 2
