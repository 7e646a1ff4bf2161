"""Validation and planning of request bodies: a decoded body becomes engine requests or an error that names the field.

Pure except for random ids.
"""
