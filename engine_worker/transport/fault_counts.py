"""Counts of faults between this process and the store, over all its incarnations; exposed as metrics."""

from dataclasses import dataclass


@dataclass(slots=True)
class FaultCounts:
    num_reaped: int = 0  # dead workers that this one found
    num_ended: int = 0  # requests ended because their gateway was gone
    num_bad_heartbeats: int = 0
    num_failures: int = 0  # heartbeats that could not be sent
    num_read_failures: int = 0  # failed reads and claims of the queue
    num_retries: int = 0  # retries of EMIT and FINISH
