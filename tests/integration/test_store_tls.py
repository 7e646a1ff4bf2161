"""rediss://: the protocol over TLS, and refusal of servers with a wrong certificate.

The embedded Valkey has no TLS, so a proxy terminates it: this tests the client side.
"""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError, RedisError

from gateway.store.inference_client import InferenceClient
from shared.messages import (
    FinishEvent,
    FinishReason,
    JournalFrame,
    TokenEvent,
    Usage,
    encode,
)
from shared.redis_client import RedisConnections, connect
from shared.redis_keys import RedisKeys
from shared.redis_scripts import Demand, Ending, RedisScripts, StepFrame, gateway_message
from tests.builders import make_request
from tests.conftest import Valkey
from tests.inbox_reader import InboxReader

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is required to create the certificates"
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create self-signed NAME.pem and NAME.key: two for 127.0.0.1, `elsewhere` for another name."""
    folder = tmp_path_factory.mktemp("certificates")
    for name, subject in (("right", "IP:127.0.0.1"), ("stranger", "IP:127.0.0.1"), ("elsewhere", "DNS:store.example")):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-days", "1", "-subj", "/CN=test", "-addext", f"subjectAltName={subject}"]
        command += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
        subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def tls_server(valkey: Valkey, certificates: Path) -> Callable[..., object]:
    """Return a context manager that serves the test's Valkey with a certificate and gives its port."""

    @asynccontextmanager
    async def serve(name: str) -> AsyncIterator[int]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
        connections: set[asyncio.Task[None]] = set()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            upstream_reader, upstream_writer = await asyncio.open_unix_connection(valkey.socket_path)
            directions = ((reader, upstream_writer), (upstream_reader, writer))
            pumps = [asyncio.create_task(pump(*direction)) for direction in directions]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in pumps:
                    each.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                upstream_writer.close()
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            await asyncio.gather(*connections)  # they end with their clients, which have closed
            await asyncio.sleep(0)  # lets the transports report their close to the loop

    return serve


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RedisConnections]:
    opened = connect(url)
    try:
        yield opened
    finally:
        await opened.aclose()
        await asyncio.sleep(0)


async def test_request_is_served_over_tls(tls_server, certificates: Path, keys: RedisKeys) -> None:
    ca = certificates / "right.pem"
    async with tls_server("right") as port, connected(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={ca}") as connections:
        client = InferenceClient(connections, keys, "g0")
        await client.start()
        scripts = RedisScripts(connections.commands, keys)
        await scripts.register("w.1")
        request = make_request(max_tokens=2)
        stream = await client.submission.submit(request)
        (entry,) = (await scripts.take("w.1", Demand(1))).entries
        await scripts.claim("w.1", [entry])
        token = TokenEvent(request.request_id, 0, [5, 6])
        end = FinishEvent(request.request_id, FinishReason.LENGTH, Usage(prompt_tokens=5, completion_tokens=2))
        frames = [StepFrame(request.request_id, entry.entry_id, encode(JournalFrame(0, [5, 6])))]
        position = {request.request_id: 0}
        await scripts.emit("w.1", 1, frames, [gateway_message("g0", "w.1", 1, [token], position)])
        ending = Ending(request.request_id, entry.queue, entry.entry_id, encode(end))
        await scripts.finish("w.1", [ending], [gateway_message("g0", "w.1", 1, [end], position)])
        assert [event async for event in InboxReader(stream)] == [token, end]
        await client.close()


@pytest.mark.parametrize(("server", "trusted"), [("stranger", "right"), ("elsewhere", "elsewhere"), ("right", None)])
async def test_tls_wrong_certificate_ends_connection(
    tls_server, certificates: Path, keys: RedisKeys, server: str, trusted: str | None
) -> None:
    """Cases: an untrusted signer, a trusted signer with another name, and no trusted signer."""
    trust = f"?ssl_ca_certs={certificates / trusted}.pem" if trusted else ""
    async with tls_server(server) as port, connected(f"rediss://127.0.0.1:{port}/0{trust}") as connections:
        with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            await connections.commands.set(keys.write_probe, b"1")


async def test_client_without_tls_is_refused(tls_server, keys: RedisKeys) -> None:
    async with tls_server("right") as port, connected(f"redis://127.0.0.1:{port}/0") as connections:
        with pytest.raises(RedisError):
            await connections.commands.set(keys.write_probe, b"1")
