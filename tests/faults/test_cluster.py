"""The store is a cluster: programs follow the primary of their model's slot, and all streams are whole."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gateway.store.inference_client import InferenceClient
from pagestream.store_checks import check_redis
from shared.redis_client import connect
from shared.redis_keys import RedisKeys
from tests.builders import make_request
from tests.faults.cluster_site import NODE_TIMEOUT_SECONDS, ClusterSite, running_cluster
from tests.faults.site import MODEL, running_site
from tests.faults.streams import Start, starting_streams

pytestmark = pytest.mark.timeout(600)
NUM_STREAMS = 30
# Seconds without a token. A killed primary is failed after the node time-out, and elected after about a second.
SILENCES: dict[Callable[[ClusterSite], None], float] = {
    ClusterSite.kill_primary: 2 * NODE_TIMEOUT_SECONDS + 3.0,
    ClusterSite.fail_over: 4.0,
    ClusterSite.move_keys: 6.0,
    ClusterSite.move_slot: 4.0,
}


@pytest.fixture
async def start_streams(demo_model_dir: Path) -> AsyncIterator[Start]:
    async with starting_streams(demo_model_dir) as start:
        yield start


async def test_names_lead_to_the_primary_of_their_slot(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "cluster", MODEL) as cluster:
        for name in ("m", "another", "a third"):
            connections = connect(cluster.url, hash_tag=name)
            try:
                key = RedisKeys(name).queue("interactive")
                await connections.commands.xadd(key, {"field": "value"})
                assert await connections.blocking.xlen(key) == 1
            finally:
                await connections.aclose()
        findings = {finding.check: finding for finding in await check_redis(cluster.url)}
        assert findings["cluster"].status == "ok"
        fixed = {finding.check: finding for finding in await check_redis(f"redis://127.0.0.1:{cluster.primary}")}
        assert fixed["cluster"].status == "fail" and "redis+cluster://" in fixed["cluster"].hint


async def test_request_right_after_a_migration_is_accepted(tmp_path: Path) -> None:
    keys = RedisKeys(MODEL)
    with running_cluster(tmp_path / "cluster", keys.hash_tag) as cluster:
        client = InferenceClient(connect(cluster.url, hash_tag=keys.hash_tag), keys, "g0")
        await client.submission.submit(make_request())
        await asyncio.to_thread(cluster.move_slot)
        await client.submission.submit(make_request())
        await client.close()


@pytest.mark.long
@pytest.mark.parametrize("fault", SILENCES, ids=lambda fault: fault.__name__)
async def test_streams_follow_the_slot(
    fault: Callable[[ClusterSite], None], demo_model_dir: Path, tmp_path: Path, start_streams: Start
) -> None:
    with running_cluster(tmp_path / "cluster", MODEL) as cluster:
        (tmp_path / "site").mkdir()
        flags = ["--script-step-seconds", "0.05"]
        options = {"num_workers": 3, "worker_flags": flags, "store_url": cluster.url}
        async with running_site(tmp_path / "site", demo_model_dir, **options) as site:  # type: ignore[arg-type]
            streams = await start_streams(site, NUM_STREAMS)
            await asyncio.to_thread(fault, cluster)
            await streams.are_whole(SILENCES[fault])
