"""Triton decides at import whether `@triton.jit` compiles or interprets, so one process can do only one of the two.
The tests under interpreted/ are collected only in a process that has chosen the interpreter; test_interpreter.py
starts it."""

import os

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETING else ["interpreted"]
