"""make faults-versions: a new gateway beside a real worker of an older commit, in both start orders.

    python -m tests.faults.old_worker [--commit 101a539] [--requests N] [--json FILE]

Requests with fields that the older worker does not know must be obeyed or refused with 503 needs_newer_worker. Plain
requests must get the text of a single new worker. The clone must contain the commit; a shallow clone is an error.
Prints a report; exits with 1 if an answer was wrong.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from pagestream.demo_model import ensure_demo_model
from tests.e2e.fleet import Fleet, connected, running_fleet
from tests.faults.conftest import Store

ROOT = Path(__file__).parents[2]
MODEL = "m"
PROMPT = "The capital of France is"
ALLOWED = [504, 253]  # tokens of the demo model
NEEDY: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": ALLOWED},
    "bad_words": {"bad_words": ["Paris"]},
}
NEW, OLD = "new", "old"


@dataclass
class Outcome:
    """The answers of one start order, by request."""

    order: str
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, kind: str, status: int, body: dict[str, Any], is_right: bool) -> None:
        code = "obeyed" if status == 200 else f"{status} {body['error']['code']}"
        is_right = is_right if status == 200 else (kind in NEEDY and body["error"]["code"] == "needs_newer_worker")
        self.counts.setdefault(kind, Counter())[code if is_right else f"WRONG {code}"] += 1
        if not is_right:
            self.wrong.append(f"{self.order}: {kind}: {status} {json.dumps(body)[:300]}")


@dataclass
class Site:
    store: Store
    fleet: Fleet
    model: Path
    sources: dict[str, Path]  # length of NEW and of OLD

    @property
    def _common(self) -> list[str]:
        return ["--model", str(self.model), "--served-model-name", MODEL, "--redis-url", self.store.url]

    def start_gateway(self) -> None:
        argv = ["-P", "-m", "gateway", *self._common, "--port", str(self.fleet.port)]
        self.fleet.start("gateway", *argv, PYTHONPATH=str(self.sources[NEW]))

    def start_worker(self, version: str) -> None:
        argv = ["-P", "-m", "engine_worker", *self._common, "--metrics-port", "0", "--worker-id", version]
        argv += ["--dtype", "float32", "--device", "cpu", "--max-model-len", "512"]
        if version == NEW:
            argv += ["--quantization", "none"]  # everything that 101a539 supports
        self.fleet.start(version, *argv, PYTHONPATH=str(self.sources[version]))

    def stop(self, name: str) -> None:
        process = self.fleet.processes.pop(name)
        process.terminate()
        process.wait()

    async def ready(self, num_workers: int) -> None:
        async with connected(f"http://127.0.0.1:{self.fleet.port}", MODEL) as api:
            await api.wait_until_ready(self.fleet, num_workers)


async def ask(site: Site, session: aiohttp.ClientSession, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **fields}
    async with session.post(f"http://127.0.0.1:{site.fleet.port}/v1/completions", json=body) as reply:
        return reply.status, await reply.json()


async def ask_all(site: Site, outcome: Outcome, expected: str, num_requests: int) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(num_requests):
            replies = await asyncio.gather(ask(site, session), *(ask(site, session, **one) for one in NEEDY.values()))
            plain, allowed, bad = replies
            outcome.add("plain", *plain, text_of(plain[1]) == expected)
            outcome.add("allowed_token_ids", *allowed, set(token_ids_of(allowed[1])) <= set(ALLOWED))
            outcome.add("bad_words", *bad, "Paris" not in text_of(bad[1]))


def text_of(body: dict[str, Any]) -> str:
    return body["choices"][0]["text"] if "choices" in body else ""


def token_ids_of(body: dict[str, Any]) -> list[int]:
    return body["choices"][0]["token_ids"] if "choices" in body else []


async def play(site: Site, first: str, num_requests: int) -> list[Outcome]:
    """Start gateway and old worker in this order, then add a new worker, then stop the old one."""
    site.start_worker(NEW)
    site.start_gateway()
    await site.ready(1)
    async with aiohttp.ClientSession() as session:
        expected = text_of((await ask(site, session))[1])
    for name in (NEW, "gateway"):
        site.stop(name)
    if first == "gateway":
        site.start_gateway()
        site.start_worker(OLD)
    else:
        site.start_worker(OLD)
        site.start_gateway()
    await site.ready(1)
    outcomes = [Outcome(f"{first} first: old worker alone")]
    await ask_all(site, outcomes[-1], expected, num_requests)
    site.start_worker(NEW)
    await site.ready(2)
    outcomes.append(Outcome(f"{first} first: old and new worker"))
    await ask_all(site, outcomes[-1], expected, num_requests)
    site.stop(OLD)
    outcomes.append(Outcome(f"{first} first: new worker after the old one"))
    await ask_all(site, outcomes[-1], expected, num_requests)
    return outcomes


@contextmanager
def running_site(directory: Path, sources: dict[str, Path], model: Path) -> Iterator[Site]:
    (directory / "store").mkdir(parents=True)
    store = Store(directory / "store", append_fsync="everysec")
    store.start()
    try:
        with running_fleet(directory / "logs") as fleet:
            yield Site(store, fleet, model, sources)
    finally:
        store.kill()


def unpack(commit: str, directory: Path) -> Path:
    """Write the files of a commit; raise CalledProcessError if the clone does not have it."""
    directory.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive, check=True)
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.old_worker", description=__doc__)
    parser.add_argument("--commit", default="101a539", help="commit of the older worker")
    parser.add_argument("--requests", type=int, default=20, help="of each kind, in each situation")
    parser.add_argument("--json", type=Path, help="file for the report")
    options = parser.parse_args()
    model = ensure_demo_model(lambda phase, progress, detail: None)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        sources = {NEW: ROOT, OLD: unpack(options.commit, directory / "old")}
        for first in ("gateway", "worker"):
            with running_site(directory / first, sources, model) as site:
                outcomes += asyncio.run(play(site, first, options.requests))
    for outcome in outcomes:
        sys.stdout.write(f"{outcome.order}: {json.dumps(outcome.counts)}\n")
    wrong = [line for outcome in outcomes for line in outcome.wrong]
    sys.stdout.write("\n".join([*wrong, f"{len(wrong)} wrong answers"]) + "\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
