"""`python -m engine_worker.follower`: a rank of a group but the first: a part of the model, and what rank 0 says.

It has no store, no HTTP and no listening socket, and reads nothing but the channel that it inherits; whatever ends it
ends the group (follower_processes.py). Only rank 0 ends it: it hears no SIGTERM, for rank 0 drains for all.

A worker starts it; nobody else does. It knows no request and no sampling.
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

from engine_worker.execution.follower_processes import BEAT_SECONDS
from engine_worker.execution.step_channel import ChannelCorrupted, ChannelFds, RingReceiver
from shared.garbage_collection import search_rarely
from shared.processes import exit_with_parent

EXIT_FAILED, EXIT_CANNOT_START, EXIT_CORRUPTED = 1, 2, 87


def main(argv: Sequence[str]) -> int:
    """`argv`: the parent's pid, the rank, the size, and the fds of the rendezvous and of the channel."""
    parent_pid, rank, size, rendezvous_fd, *fds = map(int, argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # when the watchdog of rank 0 asks what it does
    exit_with_parent(parent_pid, signal.SIGKILL)
    channel = RingReceiver(ChannelFds(*fds), rank, size)
    threading.Thread(target=_beat, args=(channel,), name="beats", daemon=True).start()
    try:
        _follow(channel, rank, rendezvous_fd)
    except ChannelCorrupted as error:
        channel.tell_cause(str(error))
        return EXIT_CORRUPTED
    except ValueError as error:  # what the loader raises for a model or a setting that it cannot serve
        channel.tell_cause(str(error))
        return EXIT_CANNOT_START
    except BaseException as error:  # MemoryError too
        channel.tell_cause(_account_of(error))
        return EXIT_FAILED
    return EXIT_FAILED


def _account_of(error: BaseException) -> str:
    """Return what an error says, then where it was raised."""
    return f"{traceback.format_exception_only(error)[-1][:500]}{traceback.format_exc()[-2500:]}"


def _beat(channel: RingReceiver) -> None:
    while True:
        channel.beat()
        time.sleep(BEAT_SECONDS)


def _follow(channel: RingReceiver, rank: int, rendezvous_fd: int) -> None:
    channel.enter("import")
    import torch  # noqa: PLC0415 - takes seconds, in which rank 0 may already end this process

    from engine_worker.execution.group_messages import start_of  # noqa: PLC0415
    from engine_worker.execution.load_replica import load_plan, load_replica, prepare_process  # noqa: PLC0415
    from engine_worker.execution.rank_group import PEERS, SERVING, meet, sum_by_peers  # noqa: PLC0415
    from engine_worker.execution.replica_group import follow  # noqa: PLC0415

    plan = load_plan(start_of(channel.receive()).settings, rank)
    prepare_process(plan.settings)
    channel.enter("join")
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)
    ranks = meet(plan, rank, rendezvous_fd)
    if plan.device.type == "cpu":  # gloo has all its connections; NCCL makes them when it first needs a path
        stop_listening()
    else:
        channel.enter(PEERS)
        sum_by_peers(ranks, plan)
    loaded = load_replica(plan, lambda phase, progress, detail: channel.enter(phase), ranks)
    search_rarely()
    channel.enter(SERVING)
    follow(loaded.replica, ranks, channel, plan.device)


def stop_listening() -> None:
    """Give up every socket of this process that listens: the ranks have connected, and nobody else is to.

    The library that opened one keeps its number, of a socket that nothing reaches; closed, the number could become
    another file's.
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
    os._exit(status)  # at once: threads of torch may wait for ranks that are gone
