"""Ways of storing weights: a file each, with one LinearMethod a device. Imported when a model is stored so."""

from importlib import import_module

from engine_worker.model.linear import LinearMethod

MODULES = {"dense": "dense"}  # ModelSpec.quantisation -> the module here


def linear_method(quantisation: str, device_type: str) -> LinearMethod:
    """`device_type`: `cpu` or `cuda`, on which the weights will be."""
    method: LinearMethod = import_module(f"{__name__}.{MODULES[quantisation]}").method(device_type)
    return method
