"""Mixtures of experts: router, products of the chosen experts and their weighted sum."""
