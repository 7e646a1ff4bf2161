"""Run many random schedules: the long form of `test_random_schedules`.

    python -m tests.engine_worker.scheduling.random_schedules --count 4000 --first-seed 100000 [--kind groups]

Each seed is one schedule of each kind. The first failure stops the run and prints its seed.
"""

import argparse
from collections.abc import Callable
from random import Random

from tests.engine_worker.scheduling.test_random_schedules import (
    Promises,
    head_of,
    random_window,
    random_windows,
    run_full_pool,
    run_random_traffic,
    run_with_drafts,
    run_with_head,
    run_with_states,
)
from tests.proposers import OracleProposer

KINDS: dict[str, Callable[[int, bool], Promises]] = {
    "full-pool": lambda seed, _is_async: run_full_pool(seed),  # often with windows and groups
    "classes": lambda seed, is_async: run_random_traffic(seed, is_async, 0.5),
    "window": lambda seed, is_async: run_random_traffic(seed, is_async, 0.2, random_window(seed)),
    "groups": lambda seed, is_async: run_random_traffic(seed, is_async, 0.2, random_windows(seed)),
    "drafts": run_with_drafts,
    "head": run_with_head,
    "states": run_with_states,
    "states-drafts": lambda seed, is_async: run_with_states(seed, is_async, OracleProposer(error_ratio=0.4, seed=seed)),
    "states-head": lambda seed, is_async: run_with_states(seed, is_async, head_of(seed, is_async)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=4000, help="schedules")
    parser.add_argument("--first-seed", type=int, default=100_000)
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=["full-pool"], help="in turn; default: full-pool")
    options = parser.parse_args()
    num_steps = num_preempted = 0
    for number in range(options.count):
        seed, kind = options.first_seed + number // len(options.kind), options.kind[number % len(options.kind)]
        is_async = Random(f"async {seed}").random() < 0.5
        try:
            promises = KINDS[kind](seed, is_async)
        except BaseException:
            print(f"seed {seed} failed, kind {kind}, async: {is_async}")
            raise
        run_random_traffic.cache_clear()
        num_steps += promises.num_steps
        num_preempted += promises.num_preempted
    print(f"{options.count} schedules, {num_steps} steps, {num_preempted} preemptions: all green")


if __name__ == "__main__":
    main()
