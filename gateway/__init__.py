"""The HTTP gateway: requests over HTTP in, Server-Sent Events out.

It tokenizes and renders text, and imports no torch.
"""
