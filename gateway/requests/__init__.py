"""A request's body -> what goes to the engine, or an error that names the field. Pure but for random ids.

A chat's way in, from its decoded body to the requests of the engine. Nothing here knows HTTP or the store.
"""
