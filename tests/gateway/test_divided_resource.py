"""One key's share of a resource that all keys divide, and what remains for the next key."""

import pytest

from gateway.auth.api_keys import ApiKey
from gateway.auth.divided_resource import DividedResource
from gateway.auth.rate_limits import Account
from gateway.errors import KeyShareExceeded, Unavailable
from gateway.fleet import unavailable


def account(name: str, *, has_neighbors: bool = True) -> Account:
    made = Account(ApiKey(name=name, sha256=name * 64), lambda: 0.0)
    made.has_neighbors = has_neighbors
    return made


def resource(total: int) -> DividedResource:
    return DividedResource("open streams", "--max-num-streams", total, lambda: unavailable("gateway_full", "full"))


def take_all(divided: DividedResource, taker: Account, amount: int = 1) -> int:
    """Take until the key is refused; return the number of successes."""
    for number in range(10_000):
        try:
            divided.take(taker, amount)
        except KeyShareExceeded:
            return number
    raise AssertionError("never refused")


@pytest.mark.parametrize(("total", "one", "other"), [(100, 80, 16), (10, 8, 2), (4096, 3277, 656)])
def test_one_key_leaves_room_for_the_next(total: int, one: int, other: int) -> None:
    divided = resource(total)
    assert take_all(divided, account("a")) == one
    assert take_all(divided, account("b")) == other
    assert divided.num_held == one + other


def test_alternating_keys_get_equal_shares() -> None:
    divided, (a, b) = resource(900), (account("a"), account("b"))
    for _ in range(400):
        divided.take(a, 1)
        divided.take(b, 1)
    for key in (a, b):
        with pytest.raises(KeyShareExceeded):
            divided.take(key, 1)


def test_share_refusal_names_resource_share_and_setting() -> None:
    divided = resource(10)
    take_all(divided, account("a"))
    with pytest.raises(KeyShareExceeded) as refused:
        divided.take(account("a"), 1)
    assert (refused.value.status, refused.value.code) == (429, "key_share_exceeded")
    assert all(text in refused.value.message for text in ("open streams", "8 of 10", "--max-num-streams"))
    assert refused.value.headers()["Retry-After"] == "2"


def test_lone_key_may_take_everything() -> None:
    divided, lone = resource(10), account("a", has_neighbors=False)
    divided.take(lone, 10)
    with pytest.raises(Unavailable) as refused:
        divided.take(lone, 1)
    assert refused.value.code == "gateway_full"


def test_newcomer_without_room_sees_a_full_gateway() -> None:
    """A newcomer holds nothing, so no request of its own can end."""
    divided = resource(10)
    take_all(divided, account("a"))
    with pytest.raises(Unavailable):
        divided.take(account("b"), 3)


def test_units_return_when_they_are_released() -> None:
    divided, key = resource(10), account("a")
    with divided.hold(key, 8) as held:
        held.shrink(3)
        assert divided.num_held == 3
        held.shrink(5)
        assert divided.num_held == 3
    assert divided.num_held == 0
    assert take_all(divided, key) == 8
