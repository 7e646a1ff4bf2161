"""URLs of stores: fixed addresses stay as they are, and those with Sentinels are read or refused with a reason."""

import pytest

from shared.store_address import store_address, store_url


@pytest.mark.parametrize("url", ["redis://u:p@h:1/2", "rediss://h", "unix:///run/store.sock?db=1"])
def test_fixed_address_is_kept(url: str) -> None:
    assert store_url(url) == url
    address = store_address(url)
    assert address.url == url and address.service is None


def test_sentinel_url_names_service_hosts_and_credentials() -> None:
    url = "rediss+sentinel://u:p%40@a:1,b,[::1]:5/my%20store/2?sentinel_password=x&ssl_cert_reqs=none"
    assert store_url(url) == url
    address = store_address(url)
    assert address.url == "rediss://u:p%40@a:1/2?ssl_cert_reqs=none"
    assert address.service is not None
    assert address.service.name == "my store"
    assert address.service.hosts == (("a", 1), ("b", 26379), ("::1", 5))
    assert address.service.credentials == {"password": "x"}
    assert "p%40" not in repr(address) and "'x'" not in repr(address)


def test_cluster_url_names_nodes() -> None:
    url = "rediss+cluster://u:p@a:1,b,[::1]:5/0?ssl_cert_reqs=none"
    assert store_url(url) == url
    address = store_address(url)
    assert address.url == "rediss://u:p@a:1?ssl_cert_reqs=none"
    assert address.nodes == (("a", 1), ("b", 6379), ("::1", 5))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://h", "redis://, rediss://, unix://"),
        ("redis://h:port", "Port"),
        ("redis+sentinel://h/", "service's name is missing"),
        ("redis+sentinel:///store", "host is missing"),
        ("redis+sentinel://a,,b/store", "host is missing"),
        ("redis+sentinel://a:1,b:99999/store", "'b:99999'"),
        ("redis+sentinel://a:x/store", "'a:x'"),
        ("redis+sentinel://a:1/store/two", "two"),
        ("redis+cluster://", "host is missing"),
        ("redis+cluster://a:1,b:x", "'b:x'"),
        ("redis+cluster://a:1/1", "database 0"),
    ],
)
def test_wrong_url_is_refused_with_a_reason(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        store_url(url)
