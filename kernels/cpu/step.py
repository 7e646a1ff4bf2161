"""C++ kernels of a step besides the linear layers: attention, norms, rotary embedding with the KV store, convolutions.

The order of a row's sums depends only on its own sequence (csrc/attention.h, csrc/rows.h), so its bits are the same in
any batch and any chunk of a prompt.
"""

from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.cpu.library import CpuLibrary, InstructionSet, address, num_threads
from kernels.fp8_kv import E4M3, UNIT_SCALES, KVScales

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
POOL_DTYPES = DTYPES | {E4M3: 2}
# Query rows per attention item of a prompt. A key tile is widened and transposed once per item; fewer rows balance
# better. 1500 tokens of SmolLM2, one layer, CPU time measured in turns: 29.6 ms with 64 rows, 27.5 with 128; since
# softmaxes cover many rows at once, 24.7 with 128 and 24.2 with 192.
_ROWS_OF_AN_ITEM = 192
_TILE = 64  # csrc/attention.h
# From this many keys on, threads share a token; only with fewer KV heads per thread, when some threads would idle.
_SHARED_KEYS, _KV_HEADS_OF_A_THREAD = 512, 4
_WIDTHS = {InstructionSet.AVX2: 8, InstructionSet.AVX512_VNNI: 16}  # elements per vector, which divide a head's
SUFFIXES = {InstructionSet.AVX2: "avx2", InstructionSet.AVX512_VNNI: "avx512"}


_TENSORS = ("block_tables", "query_start_loc", "seq_lens", "positions", "slots")


_NUMBERS = ("num_heads", "num_kv_heads", "head_dim", "block_size", "num_threads", "shares_tokens")


class _Step(Structure):
    """Mirrors Step of csrc/attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in (*_TENSORS, "scores")),
        ("scores_stride", c_int64),
        *((name, c_int64) for name in ("table_stride", "block_stride", "value_offset", "num_tokens")),
        *((name, c_int32) for name in _NUMBERS),
    )


class _Rules(Structure):
    _fields_ = (
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        ("sinks", c_void_p),
        ("value_scale", c_float),
    )


class _Convolved(Structure):
    """Mirrors Convolved of csrc/short_conv.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("factor", "gate", "value", "out")),
        *((name, c_int64) for name in ("stride", "out_stride", "channels")),
    )


class _Filter(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("width", c_int64))


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "attend": (
        POINTER(_Step), POINTER(_Rules), c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int, c_int,
    ),
    "rotate_and_store": (
        POINTER(_Step), c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_float, c_float, c_int, c_int,
    ),
    "short_conv": (POINTER(_Step), POINTER(_Convolved), POINTER(_Filter), c_void_p, c_int, c_int),
    "multiply": (c_void_p, c_float, c_int64, c_int64, c_int, c_int),
    "add_rms_norm": (c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p, c_int, c_int),
    "rms_norm": (
        c_void_p, c_void_p, c_float, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int, c_int,
    ),
}  # fmt: skip


def served_instruction_sets(library: CpuLibrary, head_dim: int) -> list[InstructionSet]:
    """Return the processor's instruction sets whose vectors divide heads of `head_dim` elements."""
    return [one for one in library.instruction_sets if head_dim % _WIDTHS[one] == 0]


def refused_head(head_dim: int) -> str:
    """Return why no processor serves heads of `head_dim` elements; "" if one with AVX2 does."""
    width = min(_WIDTHS.values())
    why = f"head size {head_dim} is not supported by the C++ kernels, which need a multiple of {width}"
    return why if head_dim % width else ""


@dataclass(slots=True, kw_only=True)
class StepArguments:
    """Arguments shared by the kernel calls of a step; `held` keeps the tensors alive that it points to."""

    step: _Step
    items: NDArray[np.int32]
    query_start_loc: NDArray[np.int32]
    held: tuple[Tensor, ...]
    scores: Tensor | None = None  # [T, Hq, stride] float32

    def point_to(
        self, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor, positions: Tensor, slots: Tensor
    ) -> None:
        """Point to another step of the same sizes, for a program whose calls share these arguments."""
        held = (block_tables, query_start_loc, seq_lens, positions, slots)
        assert (
            block_tables.stride(1) == 1
            and slots.is_contiguous()
            and [len(one) for one in held] == [len(one) for one in self.held]
        )
        for name, tensor in zip(_TENSORS, held, strict=True):
            setattr(self.step, name, tensor.data_ptr())
        self.step.table_stride = block_tables.stride(0)
        self.held = held
        self.make_room(seq_lens)

    def make_room(self, seq_lens: Tensor) -> None:
        """Allocate the scores of tokens that threads share, if there are any and sequences are long."""
        longest = int(seq_lens.max()) if self.step.shares_tokens else 0
        if longest < _SHARED_KEYS:
            self.step.scores = None
            return
        tiles = -(-longest // _TILE)
        stride = tiles * (_TILE + 1) + 1  # per row: scores, one factor per tile, the total
        if self.scores is None or self.scores.shape[2] < stride:
            self.scores = torch.empty(self.step.num_tokens, self.step.num_heads, stride + 8 * (_TILE + 1))
        self.step.scores, self.step.scores_stride = self.scores.data_ptr(), self.scores.shape[2]


class StepKernels:
    """The kernels for one head size and one pair of dtypes."""

    def __init__(
        self,
        library: CpuLibrary,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        instruction_set: InstructionSet | None = None,
    ) -> None:
        """Select the kernels.

        Args:
            library: The C++ kernels.
            head_dim: Elements per head, a multiple of 8.
            dtype: Dtype of the activations, float32 or bfloat16.
            kv_dtype: Dtype of the KV cache: float32, bfloat16 or e4m3.
            instruction_set: Default: the fastest that supports `head_dim`.

        Raises:
            ValueError: If the kernels do not support `head_dim` or a dtype.
        """
        if why := refused_head(head_dim):
            raise ValueError(why)
        served = served_instruction_sets(library, head_dim)
        if dtype not in DTYPES or kv_dtype not in POOL_DTYPES:
            raise ValueError(
                f"{dtype} with a KV cache in {kv_dtype} is not supported by the C++ kernels, "
                "which need float32 or bfloat16 (KV cache: e4m3, too)"
            )
        self.dtype = dtype
        self._types = DTYPES[dtype], POOL_DTYPES[kv_dtype]
        self.instruction_set = instruction_set or served[-1]
        suffix = SUFFIXES[self.instruction_set]
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library.functions, f"pagestream_{name}_{suffix}")
            function.argtypes, function.restype = list(arguments), None
            setattr(self, f"_{name}", function)

    _attend: Any
    _rotate_and_store: Any
    _short_conv: Any
    _add_rms_norm: Any
    _rms_norm: Any
    _multiply: Any

    def begin(
        self,
        pool: Tensor,
        num_heads: int,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        positions: Tensor,
        slots: Tensor,
    ) -> StepArguments:
        """Prepare the arguments of one step.

        Args:
            pool: [num_blocks, L, 2, Hkv, BS, D], the KV pool.
            num_heads: Query heads.
            block_tables: [S, B], int32.
            query_start_loc: [S + 1], int32.
            seq_lens: [S], int32.
            positions: [T], int64.
            slots: [T], int64.
        """
        num_kv_heads, block_size, head_dim = pool.shape[3:]
        assert pool.stride()[3:] == (block_size * head_dim, head_dim, 1)
        assert block_tables.stride(1) == 1 and slots.is_contiguous()
        held = (block_tables, query_start_loc, seq_lens, positions, slots)
        num_seqs, threads = len(seq_lens), num_threads()
        is_few = num_seqs * num_kv_heads < _KV_HEADS_OF_A_THREAD * threads
        step = _Step(
            *map(address, held),
            None,
            0,
            block_tables.stride(0),
            pool.stride(0),
            pool.stride(2),
            len(positions),
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            threads,
            threads > 1 and len(positions) == num_seqs and is_few,
        )
        starts = query_start_loc.numpy()
        items = _items(starts, max(1, _ROWS_OF_AN_ITEM * num_kv_heads // num_heads))
        arguments = StepArguments(step=step, items=items, query_start_loc=starts, held=held)
        arguments.make_room(seq_lens)
        return arguments

    def attend(
        self,
        step: StepArguments,
        qkv: Tensor,
        layer_keys: Tensor,
        scale: float,
        rows: Tensor | None = None,
        rules: ScoreRules = NO_RULES,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        """Attend in one layer.

        Args:
            step: From begin().
            qkv: [T, >= Hq * D], queries first.
            layer_keys: [num_blocks, Hkv, BS, D], the layer's keys in the pool.
            scale: Factor of the scores.
            rows: int64 rows to compute; default: all.
            rules: Window, softcap and sinks.
            scales: Scales of an e4m3 pool.

        Returns:
            [T, Hq * D], or one row per entry of `rows`.
        """
        items = step.items if rows is None else _items_of_rows(step.query_start_loc, rows)
        num_rows = len(qkv) if rows is None else len(rows)
        output = torch.empty(num_rows, step.step.num_heads * step.step.head_dim, dtype=self.dtype)
        assert qkv.stride(1) == 1 and qkv.dtype == self.dtype
        self._attend(
            byref(step.step),
            byref(_Rules(scale * scales.key, rules.softcap, rules.window, address(rules.sinks), scales.value)),
            items.ctypes.data,
            len(items),
            qkv.data_ptr(),
            qkv.stride(0),
            layer_keys.data_ptr(),
            output.data_ptr(),
            *self._types,
        )
        return output

    def rotate_and_store(
        self,
        step: StepArguments,
        qkv: Tensor,
        cos_sin: Tensor | None,
        layer_keys: Tensor,
        scales: KVScales = UNIT_SCALES,
        query_scales: Tensor | None = None,
    ) -> None:
        """Rotate queries and keys in place, then store keys and values in their slots.

        Args:
            step: From begin().
            qkv: [T, (Hq + 2 * Hkv) * D]; rows may be apart.
            cos_sin: [max_len, D], float32; None: no rotation.
            layer_keys: [num_blocks, Hkv, BS, D], the layer's keys in the pool.
            scales: Scales of an e4m3 pool.
            query_scales: [max_len], float32 factors of rotated queries by position; None: 1.
        """
        assert qkv.stride(1) == 1 and qkv.dtype == self.dtype
        self._rotate_and_store(
            byref(step.step), qkv.data_ptr(), qkv.stride(0), address(cos_sin), address(query_scales),
            layer_keys.data_ptr(), 1 / scales.key, 1 / scales.value, *self._types,
        )  # fmt: skip

    def short_conv(
        self,
        step: StepArguments,
        rows: tuple[Tensor, Tensor, Tensor],
        weight: Tensor,
        bias: Tensor | None,
        layer_keys: Tensor,
        out: Tensor,
    ) -> None:
        """Store factor * value in the slots of their tokens, and convolve them with those before, times the gate.

        Args:
            step: From begin().
            rows: Factor, gate and value, [T, C] each, in rows of one stride; C <= 2 * Hkv * D.
            weight: [C, width], in the dtype of the rows.
            bias: [C], or None.
            layer_keys: [num_blocks, Hkv, BS, D], the layer's keys in the pool, float32 or bfloat16.
            out: [T, C], written.
        """
        factor, gate, value = rows
        assert all(one.stride() == (factor.stride(0), 1) and one.dtype == self.dtype for one in rows)
        assert weight.is_contiguous() and weight.dtype == out.dtype == self.dtype and out.stride(1) == 1
        convolved = _Convolved(*map(address, (factor, gate, value, out)), factor.stride(0), out.stride(0), len(weight))
        weights = _Filter(address(weight), address(bias), weight.shape[1])
        self._short_conv(byref(step.step), byref(convolved), byref(weights), layer_keys.data_ptr(), *self._types)

    def multiply(self, x: Tensor, factor: float) -> Tensor:
        """Multiply x [N, H] with a factor in place, and return it."""
        assert x.is_contiguous() and x.dtype == self.dtype
        self._multiply(x.data_ptr(), factor, *x.shape, num_threads(), self._types[0])
        return x

    def add_rms_norm(self, x: Tensor, residual: Tensor, scaled_weight: Tensor, eps: float) -> Tensor:
        """Add `residual` to x [N, H] in place, and return x normed and multiplied with `scaled_weight` / sqrt(H)."""
        assert x.is_contiguous() and residual.is_contiguous() and x.dtype == residual.dtype == self.dtype
        normed = torch.empty_like(x)
        rows, size = x.shape
        self._add_rms_norm(
            x.data_ptr(), residual.data_ptr(), scaled_weight.data_ptr(), eps * size, rows, size, normed.data_ptr(),
            num_threads(), self._types[0],
        )  # fmt: skip
        return normed

    def rms_norm(self, x: Tensor, scaled_weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """Norm each part of x [N, parts * H] into `out`, which may be x itself; `scaled_weight` is [H]."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        assert x.stride(1) == out.stride(1) == 1 and x.dtype == out.dtype == self.dtype
        size = len(scaled_weight)
        self._rms_norm(
            x.data_ptr(), scaled_weight.data_ptr(), eps * size, len(x), x.stride(0), x.shape[1] // size, size,
            out.data_ptr(), out.stride(0), num_threads(), self._types[0],
        )  # fmt: skip
        return out


def _items(starts: NDArray[np.int32], num_tokens: int) -> NDArray[np.int32]:
    """Return [N, 4]: sequence, first token, end, first output row; each item has at most `num_tokens` tokens.

    The last ones come first: they have the most keys of a prompt, and of sequences sorted by length.
    """
    if len(starts) - 1 == starts[-1]:  # one token per sequence
        rows = np.arange(len(starts) - 1, dtype=np.int32)[::-1]
        return np.stack((rows, rows, rows + 1, rows), axis=1)
    bounds = starts.tolist()
    found = [
        (sequence, first, min(first + num_tokens, end), first)
        for sequence, (start, end) in enumerate(pairwise(bounds))
        for first in range(start, end, num_tokens)
    ]
    return np.array(found[::-1], dtype=np.int32).reshape(-1, 4)


def _items_of_rows(starts: NDArray[np.int32], rows: Tensor) -> NDArray[np.int32]:
    tokens = rows.numpy()
    sequences = np.searchsorted(starts, tokens, side="right") - 1
    return np.stack((sequences, tokens, tokens + 1, np.arange(len(tokens))), axis=1).astype(np.int32)
