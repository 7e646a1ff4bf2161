"""Add a shared expert to the routed ones, times the sigmoid of a linear layer with one output.

    add_gated(outputs [T, H], shared [T, H], x [T, H], weight [H]) -> outputs + shared * sigmoid(x . weight)

A row's result does not depend on other rows. CPU tensors use the reference below.
"""

import torch
from torch import Tensor


def add_gated_reference(outputs: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Do what add_gated() does, with torch operators that compute each row alone.

    A matrix product is none, and torch.sigmoid computes the last rows without vectors. sigmoid(z) is softmax(z, 0).
    """
    logits = (x.float() * weight.float()).sum(-1, keepdim=True)
    gate = torch.cat((logits, torch.zeros_like(logits)), dim=-1).softmax(-1)[:, :1]
    return (outputs.float() + shared.float() * gate).to(outputs.dtype)


def add_gated(outputs: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the sum; computed in float32, and of the dtype of `outputs`."""
    if not outputs.is_cuda:
        return add_gated_reference(outputs, shared, x, weight)
    from kernels.moe.shared_gate_triton import add_gated_triton  # noqa: PLC0415 - a CPU has no triton

    return add_gated_triton(outputs, shared, x, weight)
