"""The agreements of the gateway and the engine worker: messages, Redis names and scripts, settings, logs. A leaf.

Both programs meet here and in the store alone. Every walk crosses it. Nothing here knows one of them, torch or HTTP.
"""
