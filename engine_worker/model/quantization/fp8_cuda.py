"""fp8 linear layers on CUDA: fp8_linear for few rows where its rule has tiles, else the library.

With more rows, row scales use torch's row-wise kernel (CUTLASS), and block scales cuBLASLt's 1 x 128 by 128 x 128
kernel on Hopper. Other sizes and devices dequantize to 16 bits for each call. With `--deterministic` all rows go
through fp8_linear in pieces, because its bits do not depend on the number of rows.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from engine_worker.model.linear import Input
from engine_worker.model.specs.mlp import GateKind, GateSpec
from kernels.fp8_linear import fp8_linear, gated_fp8_linear
from kernels.fp8_quantize import quantize_groups, quantize_rows
from kernels.fp8_tiles import fp8_tiles, max_fp8_rows
from kernels.scaled import GROUP, Scaled, Scaling
from kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul, silu_and_mul_quantized
from kernels.skinny_linear_tiles import Shape, is_known

_OUTPUTS_OF_A_TILE = 64  # of fp8_linear; other sizes are padded, which saves 8 us with 96 outputs (H100)
_LIBRARY_MULTIPLE = 16  # outputs and inputs of a row-wise kernel: TMA needs 16 bytes


class Fp8Linear:
    """An fp8 weight and its kernels."""

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        input_scale: float | None = None,
        is_gated: bool = False,
        is_deterministic: bool = False,
    ) -> None:
        """Choose the kernels.

        Args:
            weight: [N, K], float8_e4m3fn.
            weight_scale: float32, [N] or [N / 128, K / 128] rounded up.
            bias: [N], or None.
            input_scale: Static scale of a checkpoint; unused, because rows are scaled by their own maximum, which is
                finer.
            is_gated: The layer is used by gated().
            is_deterministic: Rows must have the same bits in any batch.

        Raises:
            ValueError: If `is_deterministic` and fp8_linear has no tiles.
        """
        self._num_outputs = len(weight)
        if weight_scale.dim() == 1 and not is_gated:
            weight, weight_scale = _with_whole_tiles(weight, weight_scale)
        self._weight = Scaled(weight.contiguous(), weight_scale.float().contiguous())
        self._bias = bias
        self._has_kernel = is_known(weight.device)
        self._is_deterministic = is_deterministic
        self._is_in_pieces = is_deterministic or not _supports_block_scales(self._weight)
        self.scaling = Scaling.GROUPS if self._weight.is_grouped else Scaling.ROWS
        if is_deterministic and self._max_rows(is_gated and bias is None) == 0:
            raise ValueError(
                f"--deterministic: fp8_linear needs multiples of 64 outputs and of {GROUP} inputs on an H100 or H200; "
                f"a layer here has {weight.shape[0]} and {weight.shape[1]}. Use --quantization none"
            )

    def __call__(self, x: Input) -> Tensor:
        rows = self._quantized(x)
        outputs = self._own_kernel(rows, is_gated=False)
        if outputs is None:
            outputs = _library_kernel(rows, self._weight)
        if outputs.shape[1] != self._num_outputs:
            outputs = outputs[:, : self._num_outputs].contiguous()
        return outputs if self._bias is None else outputs.add_(self._bias)

    def gated(self, x: Input, gate: GateSpec, scaling: Scaling = Scaling.NONE) -> Input:
        rows = self._quantized(x)
        if gate.kind is GateKind.GELU_TANH:
            return _quantized_by(scaling, gelu_tanh_and_mul(self(rows)))
        outputs = self._own_kernel(rows, is_gated=True) if self._bias is None else None
        if outputs is not None:
            return _quantized_by(scaling, outputs)
        outputs = self(rows)
        if scaling is Scaling.ROWS:
            return silu_and_mul_quantized(outputs)
        return _quantized_by(scaling, silu_and_mul(outputs))

    def _quantized(self, x: Input) -> Scaled:
        return x if isinstance(x, Scaled) else _scaled_by(self.scaling, x)

    def _own_kernel(self, rows: Scaled, is_gated: bool) -> Tensor | None:
        """Return None if the library is faster or has the only kernel."""
        max_rows = self._max_rows(is_gated)
        if max_rows == 0 or (len(rows) > max_rows and not self._is_in_pieces):
            return None
        operation = gated_fp8_linear if is_gated else fp8_linear
        pieces = []
        for start in range(0, max(1, len(rows)), max_rows):
            piece = rows if len(rows) <= max_rows else rows.part(start, start + max_rows)
            tiles = fp8_tiles(self._shape(is_gated), len(piece), self._weight.is_grouped)
            assert tiles is not None
            pieces.append(operation(piece, self._weight, tiles))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _max_rows(self, is_gated: bool) -> int:
        if not self._has_kernel:
            return 0
        return max_fp8_rows(self._shape(is_gated), self._weight.is_grouped, self._is_deterministic)

    def _shape(self, is_gated: bool) -> Shape:
        num_outputs, num_inputs = self._weight.values.shape
        return (num_outputs // 2 if is_gated else num_outputs, num_inputs, is_gated)


def _with_whole_tiles(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [N, K] and scale [N] with zero rows up to the end of a tile."""
    missing = -len(weight) % _OUTPUTS_OF_A_TILE
    if not missing:
        return weight, scale
    values = F.pad(weight.view(torch.uint8), (0, 0, 0, missing)).view(weight.dtype)
    return values, F.pad(scale, (0, missing))


def _scaled_by(scaling: Scaling, x: Tensor) -> Scaled:
    return quantize_groups(x) if scaling is Scaling.GROUPS else quantize_rows(x)


def _quantized_by(scaling: Scaling, x: Tensor) -> Input:
    return x if scaling is Scaling.NONE else _scaled_by(scaling, x)


def _supports_block_scales(weight: Scaled) -> bool:
    """Return whether cuBLASLt supports the block scales; it reads them by fours along K (pytorch#166752)."""
    return not weight.is_grouped or weight.scales.shape[1] % 4 == 0


def _library_kernel(rows: Scaled, weight: Scaled) -> Tensor:
    num_outputs, num_inputs = weight.values.shape
    if weight.is_grouped and _is_hopper(weight.values.device) and _supports_block_scales(weight):
        return _block_scaled_mm(rows, weight)
    if weight.is_grouped or num_outputs % _LIBRARY_MULTIPLE or num_inputs % _LIBRARY_MULTIPLE:
        return F.linear(rows.exact_rows().bfloat16(), weight.exact_weight().bfloat16())
    return F.scaled_mm(
        rows.values,
        weight.values.T,
        rows.scales[:, None],
        ScalingType.RowWise,
        weight.scales[None, :],
        ScalingType.RowWise,
        output_dtype=torch.bfloat16,
    )


def _block_scaled_mm(rows: Scaled, weight: Scaled) -> Tensor:
    missing = -len(rows) % 4  # cuBLASLt reads the scales of four rows at once
    values, scales = F.pad(rows.values, (0, 0, 0, missing)), F.pad(rows.scales, (0, missing))
    outputs = F.scaled_mm(
        values,
        weight.values.T,
        scales.T,
        ScalingType.BlockWise1x128,
        weight.scales.T,
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return outputs[: len(rows)]


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)
