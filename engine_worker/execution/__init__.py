"""Carries out a scheduled batch on the device. The only code that owns device memory."""
