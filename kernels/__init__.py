"""Device kernels in torch, Triton and C++, one operation per file or folder.

Each operation has a contract (shapes and dtypes) and a torch reference beside the kernel. This package imports no
other package of the repository.
"""
