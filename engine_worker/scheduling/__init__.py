"""Decides which sequences run in the next step, and where their KV blocks are. Pure: no torch, no I/O, no clock."""
