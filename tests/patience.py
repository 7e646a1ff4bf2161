"""The time limit of a test for an expected event, which takes milliseconds; the limit is for a loaded machine.

It is never asserted: a test of a duration uses CPU time (tests/idle_seconds.py).
"""

PATIENCE_SECONDS = 60.0
