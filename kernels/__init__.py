"""Device kernels in torch and Triton; one operation a file. Knows nothing of serving.

They are used in every step, where a block's walk is on the device.
"""
