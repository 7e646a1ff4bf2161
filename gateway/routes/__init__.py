"""Route handlers: one short coroutine per route, and a table OPERATIONS per module."""
