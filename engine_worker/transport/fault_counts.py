"""Counts of faults between this process and the store, over all its lives; exposed as metrics.

Each part of the transport that counts is given the process's one. Decides nothing.

It stands beside every walk that crosses the store. It knows numbers alone, and decides nothing.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class FaultCounts:
    num_reaped: int = 0  # workers that this one found dead
    num_ended: int = 0  # requests whose gateway was gone
    num_bad_heartbeats: int = 0
    num_failures: int = 0  # heartbeats that could not be sent
    num_read_failures: int = 0  # reads and claims of the queue
    num_retries: int = 0  # of steps and ends that the store did not take
