"""Who may use the gateway, from where, and how much of it.

A chat's way in begins here, before its body is read. Nothing here knows a body.
"""
