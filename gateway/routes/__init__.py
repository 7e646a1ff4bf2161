"""Route handlers, one short coroutine a route."""
