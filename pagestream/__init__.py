"""The command line and the supervisor of the embedded default. Holds no serving logic.

It knows gateway and workers as processes alone, by their command lines, heartbeats and exit statuses.
It starts them before any walk.
"""
