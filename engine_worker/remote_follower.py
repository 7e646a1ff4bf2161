"""`python -m engine_worker.remote_follower`: a rank of a group that spans hosts, on another host than rank 0.

    --rendezvous-endpoint HOST:PORT --rank R --tensor-parallel-size N [--model DIRECTORY]

It gets its settings from rank 0, carries out its messages, and exits when rank 0 does. The cluster manager starts all
ranks of a group, and restarts all when one has ended. It ignores SIGTERM, because rank 0 drains for all.
"""

import argparse
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from engine_worker.follower import EXIT_CANNOT_START, EXIT_CORRUPTED, EXIT_FAILED
from shared.garbage_collection import search_rarely
from shared.logs import configure_logging

logger = logging.getLogger("worker")


def main(argv: Sequence[str]) -> int:
    """Run the rank, and return the exit status."""
    options = _parser().parse_args(argv)
    configure_logging(options.log_format)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    from engine_worker.execution.ranks.step_channel import ChannelCorrupted  # noqa: PLC0415 - after the options are checked

    try:
        _follow(options)
    except ChannelCorrupted as error:
        logger.critical("rank %d: %s", options.rank, error)
        return EXIT_CORRUPTED
    except ValueError as error:
        logger.critical("rank %d cannot start: %s", options.rank, error)
        return EXIT_CANNOT_START
    except Exception:
        logger.exception("rank %d ends", options.rank)
    return EXIT_FAILED


def _follow(options: argparse.Namespace) -> None:
    from engine_worker.execution.load.load_replica import load_replica  # noqa: PLC0415 - torch takes seconds
    from engine_worker.execution.load.spanning_group import join_group  # noqa: PLC0415
    from engine_worker.execution.ranks.replica_group import Follower  # noqa: PLC0415

    size = options.tensor_parallel_size
    member = join_group(options.rendezvous_endpoint, options.rank, size, options.model)

    def report(phase: str, progress: float, detail: str) -> None:
        if progress == 1.0:
            logger.info("rank %d of %d: %s %s", options.rank, size, phase, detail)

    loaded = load_replica(member.plan, report, member.tensor_parallel)
    search_rarely()
    follower = Follower(loaded.replica, member.tensor_parallel, member.plan.device, loaded.drafts)
    follower.follow(member.channel)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine_worker.remote_follower", description="One rank of a group.")
    parser.add_argument("--rendezvous-endpoint", required=True, help="HOST:PORT, the same as at rank 0")
    parser.add_argument("--rank", type=int, required=True, help="rank, 1 to tensor-parallel-size - 1")
    parser.add_argument("--tensor-parallel-size", type=int, required=True, help="number of ranks, as at rank 0")
    parser.add_argument("--model", type=Path, help="model directory on this host; default: the path at rank 0")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    return parser


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # without cleanup, because threads of torch may wait for ranks that are gone
