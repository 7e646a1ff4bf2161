"""Device kernels in torch and Triton; one operation a file. Knows nothing of serving."""
