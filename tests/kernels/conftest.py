"""Collect interpreted/ only in a process that has chosen Triton's interpreter.

Triton decides at import whether `@triton.jit` compiles or interprets, so one process can do only one of the two.
test_interpreter.py starts the other process.
"""

import os

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETING else ["interpreted"]
