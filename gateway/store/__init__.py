"""The gateway's only Redis code: requests in, ordered events out, and what is read of the fleet and the queues.

A chat's way in ends here, and a token's way back begins. Nothing here knows HTTP, text or an API.
"""
