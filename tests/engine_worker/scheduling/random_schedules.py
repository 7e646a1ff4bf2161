"""Run many random schedules with windows, odd budgets, and full pools: the long form of `test_random_schedules`.

    python -m tests.engine_worker.scheduling.random_schedules --count 4000 --first-seed 100000

Each seed is one schedule. The first failure stops the run and prints its seed.
"""

import argparse

from tests.engine_worker.scheduling.test_random_schedules import run_full_pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=4000, help="schedules")
    parser.add_argument("--first-seed", type=int, default=100_000)
    options = parser.parse_args()
    num_steps = num_preempted = 0
    for seed in range(options.first_seed, options.first_seed + options.count):
        try:
            promises = run_full_pool(seed)
        except BaseException:
            print(f"seed {seed} failed")
            raise
        num_steps += promises.num_steps
        num_preempted += promises.num_preempted
    print(f"{options.count} schedules, {num_steps} steps, {num_preempted} preemptions: all green")


if __name__ == "__main__":
    main()
