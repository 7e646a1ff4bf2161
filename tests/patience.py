"""How long a test waits for what must come. It comes in milliseconds; this is for a machine that does ten other things.

A stop, never a claim: a test that asserts how long something takes says so in CPU time (tests/idle_seconds.py).
"""

PATIENCE_SECONDS = 60.0
