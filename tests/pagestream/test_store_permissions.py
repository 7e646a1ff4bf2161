"""What `pagestream doctor` finds of the store's user, on a real store with the users of the deployment."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving.free_port import free_port
from pagestream.finding import Finding
from pagestream.store_checks import check_redis
from pagestream.store_permissions import CHECK, RULES
from tests.conftest import running_server

BASE = Path(__file__).parents[2] / "deploy" / "kustomize" / "base" / "users.acl"
ADMINISTRATOR = "user admin on nopass ~* &* +@all\n"


def changed(rules: str, user: str, old: str, new: str = "") -> str:
    (line,) = [line for line in rules.splitlines() if line.startswith(f"user {user} ")]
    assert old in line
    return rules.replace(line, line.replace(old, new, 1))


@pytest.fixture
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return the URL of each user, of a store with changed rules: `request.param` is what the gateway lacks."""
    rules = changed(BASE.read_text(), "gateway", request.param) if request.param else BASE.read_text()
    (tmp_path / "users.acl").write_text(rules + ADMINISTRATOR)
    options = ["--port", str(port := free_port()), "--aclfile", str(tmp_path / "users.acl")]
    with running_server(request.config, options):
        yield {user: f"redis://{user}@127.0.0.1:{port}/0" for user in ("gateway", "worker", "admin")}


async def finding_of(url: str) -> Finding:
    (finding,) = [finding for finding in await check_redis(url) if finding.check == CHECK]
    return finding


def test_doctor_knows_the_rules_of_the_deployment() -> None:
    assert RULES.read_text() == BASE.read_text()


@pytest.mark.parametrize("urls", [""], indirect=True)
async def test_users_of_the_deployment_pass(urls: dict[str, str]) -> None:
    found = await finding_of(urls["gateway"])
    assert (found.status, found.message) == ("ok", "gateway may do all that a gateway does")
    found = await finding_of(urls["admin"])
    assert (found.status, found.message) == ("ok", "admin may do all that a gateway or a worker does")


@pytest.mark.parametrize(
    "urls", [" +zadd", " +xinfo|groups", " ~{*}:dlq", " %R~{*}:held:*", " &{*}:kv", " +evalsha"], indirect=True
)
async def test_missing_right_is_named(urls: dict[str, str], request: pytest.FixtureRequest) -> None:
    found = await finding_of(urls["gateway"])
    assert found.status == "fail"
    assert found.message.endswith(f"gateway does: {request.node.callspec.params['urls'].strip()}")


@pytest.mark.parametrize("urls", [" +acl|dryrun"], indirect=True)
async def test_user_that_may_not_try_is_a_warning(urls: dict[str, str]) -> None:
    assert (await finding_of(urls["gateway"])).status == "warn"
