"""The limits per minute of API keys over all gateways, counted in the store (shared/redis_scripts/limit.lua).

A request is counted there before it is served; the tokens of running answers follow every half second and with each
request. Without the store each gateway's own count remains (rate_limits.py), so that an outage refuses nobody.
"""

import logging
from collections.abc import Callable, Iterable

from gateway.auth.rate_limits import CHARGE_SECONDS, Account
from gateway.errors import RateLimited
from gateway.store.store_calls import StoreCalls, StoreUnavailable
from shared.fleet_clock import FleetClock
from shared.redis_scripts import LimitReply, LimitVerdict, RedisScripts
from shared.ticks import next_tick

logger = logging.getLogger("gateway")


class SharedLimits:
    def __init__(self, scripts: RedisScripts, fleet_clock: FleetClock, calls: StoreCalls) -> None:
        self._scripts = scripts
        self._fleet_clock = fleet_clock
        self._calls = calls

    async def begin(self, account: Account, *, generates: bool) -> None:
        """Count a request that the account has counted.

        Args:
            account: The account.
            generates: Whether it produces tokens, which a key in debt may not.

        Raises:
            RateLimited: If the key has used up its requests or tokens at all gateways together.
        """
        if not account.is_limited:
            return
        reply = await self._spend(account, num_requests=1, refuses_debt=generates)
        if reply is None or reply.verdict is LimitVerdict.OK:
            return
        account.give_back_request()
        raise self._refusal(account, reply)

    async def share(self, accounts: Callable[[], Iterable[Account]]) -> None:
        """Count the tokens of running answers, every half second. Runs as an owner task."""
        while True:
            await next_tick(CHARGE_SECONDS)
            for account in accounts():
                if account.is_limited and account.has_unshared():
                    await self._spend(account, num_requests=0, refuses_debt=False)

    @staticmethod
    def _refusal(account: Account, reply: LimitReply) -> RateLimited:
        if reply.verdict is LimitVerdict.REQUESTS:
            return account.too_many_requests(reply.wait_seconds)
        return account.too_many_tokens(reply.wait_seconds)

    async def _spend(self, account: Account, *, num_requests: int, refuses_debt: bool) -> LimitReply | None:
        """Return None if the store does not answer."""
        assert account.key is not None
        spent = account.take_unshared()
        call = self._scripts.limit(
            account.owner_key_hash,
            self._fleet_clock.now(),
            requests_per_minute=account.key.requests_per_minute or 0,
            tokens_per_minute=account.key.tokens_per_minute or 0,
            num_requests=num_requests,
            num_tokens=spent,
            refuses_debt=refuses_debt,
        )
        try:
            reply = await self._calls.ask(call)
        except StoreUnavailable as error:
            account.return_unshared(spent)
            logger.debug("limits of key %s: not shared: %s", account.tenant, error)
            return None
        account.learn(reply.tokens_left)
        return reply
