"""A fake gateway, worker, and batch driver, and `pagestream serve` run with them: python fake_children.py ARGS.

The gateway answers /ready; the worker sends READY heartbeats. `--fake-worker-exit N` ends the worker with status N at
once; with `--fake-worker-stays yes` it ignores SIGTERM.
"""

import argparse
import contextlib
import http.server
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

import redis

from pagestream import child_commands, cli
from pagestream.child_process import ChildCommand
from shared.messages import WorkerHeartbeat, WorkerPhase, encode
from shared.redis_keys import RedisKeys


def fake_command(name: str, module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> ChildCommand:
    argv = [sys.executable, __file__, f"fake-{module}", *arguments]
    return ChildCommand(name=name, argv=argv, environ={**os.environ, **environ})


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.rfile.read()  # until the client has read the answer and left
        print("answered", flush=True)

    def log_message(self, *_args: object) -> None: ...


def gateway(options: argparse.Namespace) -> None:
    http.server.HTTPServer.allow_reuse_port = options.reuse_port
    server = http.server.HTTPServer((options.host, int(options.port)), Ready)
    print("fake gateway", flush=True)  # the gateway listens
    server.serve_forever()


def batches(options: argparse.Namespace) -> None:
    print("fake batch driver", flush=True)
    signal.pause()


def worker(options: argparse.Namespace) -> None:
    print(f"fake worker {options.worker_id}", flush=True)
    if options.fake_worker_exit is not None:
        sys.exit(int(options.fake_worker_exit))
    channel = RedisKeys(options.served_model_name).heartbeat_channel
    if options.fake_worker_stays:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    client = redis.Redis.from_url(options.redis_url)
    beats = [(options.worker_id, WorkerPhase.LOAD), (f"{options.worker_id}.0", WorkerPhase.READY)]
    while True:
        with contextlib.suppress(redis.ConnectionError):  # the worker outlives the store, as the real one does
            for worker_id, phase in beats:
                client.publish(channel, encode(WorkerHeartbeat(worker_id=worker_id, phase=phase)))
        time.sleep(0.05)  # the heartbeat interval, not a wait for an event


def main() -> int:
    programs = {"fake-gateway": gateway, "fake-engine_worker": worker, "fake-gateway.batches.driver": batches}
    if sys.argv[1] not in programs:
        child_commands._python = fake_command
        return cli.main(sys.argv[1:])
    parser = argparse.ArgumentParser()
    for name in ("host", "port", "worker-id", "served-model-name"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--redis-url", default=os.environ.get("PAGESTREAM_REDIS_URL"))
    parser.add_argument("--fake-worker-exit")
    parser.add_argument("--fake-worker-stays")
    parser.add_argument("--reuse-port", action="store_true")
    options, others = parser.parse_known_args(sys.argv[2:])
    if "--check" in others:
        return 0
    programs[sys.argv[1]](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
