"""HTTP in, Server-Sent Events out. Owns text; knows nothing of torch or of the device.

The first half of a chat's way in, and the last of a token's way back.
"""
