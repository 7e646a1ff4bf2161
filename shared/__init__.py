"""The agreements of the gateway and the engine worker: messages, Redis names and scripts, settings, logs. A leaf.

Both programs meet here and in the store alone. Nothing here knows one of them, torch or HTTP.
"""
