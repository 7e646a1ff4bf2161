"""KV as values: the ground floor of the worker. Nothing here knows a sequence, a tensor or a device."""
