"""`--gateways auto`: two gateways per GPU worker if there are several, else one; and how evenly a port is shared."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from pagestream import banner
from pagestream.gateway_count import GatewayCount, count_gateways, counts_for_keys
from pagestream.serve_settings import ServeSettings, split_flags
from shared.settings import load_settings

NO_FLAGS = split_flags([])


@pytest.mark.parametrize(
    ("num_workers", "num_gpus", "num_cores", "number"),
    [
        (1, 0, 64, 1),  # a CPU
        (4, 0, 64, 1),
        (1, 1, 16, 1),  # /metrics of the one gateway is complete
        (2, 2, 32, 4),
        (8, 8, 128, 16),
        (2, 1, 32, 4),  # two copies on one GPU
        (2, 2, 6, 3),  # cores are short: three are for the workers and the store
        (1, 1, 2, 1),
        (8, 8, 4, 1),
        (64, 8, 512, 32),
    ],
)
def test_gateway_count_follows_workers_and_cores(num_workers: int, num_gpus: int, num_cores: int, number: int) -> None:
    gpus = list(map(str, range(num_gpus)))
    count = count_gateways(None, num_workers=num_workers, gpus=gpus, num_cores=num_cores, counts_for_keys=False)
    assert count.number == number and count.reason


def test_explicit_count_is_used_without_a_reason() -> None:
    count = count_gateways(3, num_workers=1, gpus=["0"], num_cores=1, counts_for_keys=True)
    assert count == GatewayCount(3)
    assert banner.opening(["m"], count, 1).count("\n") == 0


def test_keys_default_to_one_gateway() -> None:
    count = count_gateways(None, num_workers=2, gpus=["0", "1"], num_cores=64, counts_for_keys=True)
    assert count.number == 1
    assert "gateways  1: each gateway counts the limits of API keys alone" in banner.opening(["m"], count, 2)


def test_keys_file_is_found_in_flags_and_environment(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('port = 9000\n[gateway]\napi-keys-file = "/keys"\n')
    assert counts_for_keys(split_flags(["--api-keys-file", "/keys"]), {}, None)
    assert counts_for_keys(split_flags(["--api-keys-file=/keys"]), {}, None)
    assert counts_for_keys(NO_FLAGS, {"PAGESTREAM_API_KEYS_FILE": "/keys"}, None)
    assert counts_for_keys(NO_FLAGS, {}, config)
    assert not counts_for_keys(split_flags(["--api-key", "k"]), {}, None)  # one key, without limits


@pytest.mark.parametrize(("text", "gateways"), [("auto", None), ("5", 5)])
def test_gateways_option_is_a_number_or_auto(text: str, gateways: int | None) -> None:
    loaded = load_settings(ServeSettings, ["--gateways", text], {}, prog="pagestream serve")
    assert loaded.settings.gateways == gateways


@pytest.mark.parametrize("words", [["--device", "cpu"], ["--device=cpu"]])
def test_a_worker_on_the_cpu_has_no_gpu(words: list[str]) -> None:
    assert split_flags(words).is_for_cpu and not split_flags(["--device", "cuda"]).is_for_cpu


def test_the_kernel_shares_connections_to_a_few_percent() -> None:
    """The kernel assigns 1,000 connections to four listeners by a hash of their addresses.

    By chance each gets 250 with a standard deviation of 14. The fullest had 7 % more than its share in the mean of 40
    rounds, and 20 % in the worst round.
    """
    with ExitStack() as stack:
        listeners, port = [], 0
        for _ in range(4):
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(1024)
            listener.setblocking(False)
            port = listener.getsockname()[1]
            listeners.append(listener)
        for _ in range(1000):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        counts = [num_accepted(listener, stack) for listener in listeners]
    assert sum(counts) == 1000 and max(counts) <= 1.4 * 250, counts


def num_accepted(listener: socket.socket, stack: ExitStack) -> int:
    count = 0
    while True:
        try:
            stack.enter_context(listener.accept()[0])
        except BlockingIOError:
            return count
        count += 1
