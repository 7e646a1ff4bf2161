"""Kept answers of any API."""
