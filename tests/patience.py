"""Time limits of waiting tests. Events take milliseconds; the limits suit a machine with ten busy processes.

A limit ends a hung test and asserts nothing. A test of speed measures CPU time (tests/idle_seconds.py).
"""

PATIENCE_SECONDS = 60.0
