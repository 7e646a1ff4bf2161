"""The command line, and the supervisor that runs store, workers, and gateways on one machine. No serving logic.

Other processes are known only by their command lines, heartbeats, and exit statuses.
"""
