"""`python -m engine_worker.follower`: a rank of a group other than rank 0. A worker starts it.

It loads its part of the model and carries out the messages of rank 0. It reads only the channel that it inherits: no
store, no HTTP, no listening socket. Its end ends the group (follower_processes.py). It ignores SIGTERM, because rank 0
drains for all and ends it.
"""

import faulthandler
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress

from engine_worker.execution.ranks.follower_processes import BEAT_SECONDS
from engine_worker.execution.ranks.step_channel import ChannelCorrupted, ChannelFds, RingReceiver
from shared.garbage_collection import search_rarely
from shared.processes import exit_with_parent

EXIT_FAILED, EXIT_CANNOT_START, EXIT_CORRUPTED = 1, 2, 87


def main(argv: Sequence[str]) -> int:
    """Run the rank, and return the exit status.

    Args:
        argv: The parent's pid, the rank, the size, and the fds of the rendezvous and the channel.
    """
    parent_pid, rank, size, rendezvous_fd, *fds = map(int, argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the watchdog of rank 0 requests the stacks
    exit_with_parent(parent_pid, signal.SIGKILL)
    channel = RingReceiver(ChannelFds(*fds), rank, size)
    threading.Thread(target=_beat, args=(channel,), name="beats", daemon=True).start()
    try:
        _follow(channel, rank, rendezvous_fd)
    except ChannelCorrupted as error:
        channel.tell_cause(str(error))
        return EXIT_CORRUPTED
    except ValueError as error:  # the loader raises it for a model or a setting that it cannot serve
        channel.tell_cause(str(error))
        return EXIT_CANNOT_START
    except BaseException as error:  # includes MemoryError
        channel.tell_cause(_account_of(error))
        return EXIT_FAILED
    return EXIT_FAILED


def _account_of(error: BaseException) -> str:
    """Return the message of an error, then its traceback."""
    return f"{traceback.format_exception_only(error)[-1][:500]}{traceback.format_exc()[-2500:]}"


def _beat(channel: RingReceiver) -> None:
    while True:
        channel.beat()
        time.sleep(BEAT_SECONDS)


def _follow(channel: RingReceiver, rank: int, rendezvous_fd: int) -> None:
    channel.enter("import")
    import torch  # noqa: PLC0415 - takes seconds, during which rank 0 can already end this process

    from engine_worker.execution.load.load_replica import load_plan, load_replica, prepare_process  # noqa: PLC0415
    from engine_worker.execution.load.rank_group import PEERS, SERVING, meet, sum_by_peers  # noqa: PLC0415
    from engine_worker.execution.ranks.group_messages import start_of  # noqa: PLC0415
    from engine_worker.execution.ranks.replica_group import Follower  # noqa: PLC0415

    start = start_of(channel.receive())
    plan = load_plan(start.settings, rank, start.drafts)
    prepare_process(plan.settings)
    channel.enter("join")
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)
    ranks = meet(plan, rank, rendezvous_fd)
    if plan.device.type == "cpu":  # gloo has all its connections; NCCL opens them on first use
        stop_listening()
    else:
        channel.enter(PEERS)
        sum_by_peers(ranks, plan)
    loaded = load_replica(plan, lambda phase, progress, detail: channel.enter(phase), ranks)
    search_rarely()
    channel.enter(SERVING)
    Follower(loaded.replica, ranks, plan.device, loaded.drafts).follow(channel)


def stop_listening() -> None:
    """Close every listening socket of this process, after the ranks have connected.

    Each descriptor is replaced with an unbound socket, because its library may still use the number.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            _stop_listening(int(name))


def _stop_listening(fd: int) -> None:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return
    with socket.socket(fileno=os.dup(fd)) as opened:
        if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with socket.socket() as unbound:
                os.dup2(unbound.fileno(), fd, inheritable=False)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # without cleanup, because threads of torch may wait for ranks that are gone
