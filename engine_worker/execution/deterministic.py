"""Matrix products whose rows do not depend on how many rows there are.

cuBLAS chooses a kernel by the number of rows. On Hopper its kernels agree bit by bit, but for those that split the
inputs and add the parts: with almost no workspace there is nowhere to put parts (ADR 0027). skinny_linear never splits.
"""

import os

import torch


def use_batch_invariant_products() -> None:
    """For the whole process; to be called before it uses CUDA, because cuBLAS reads the variables when it starts."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("batch-invariant products must be chosen before CUDA starts in this process")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
