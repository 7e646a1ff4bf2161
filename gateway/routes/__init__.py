"""Route handlers, one short coroutine a route.

A chat's way in has one of them behind the middlewares. None of them knows the engine.
"""
