"""Operands of the products of attention over a cache of 8 bits (kernels/fp8_kv.py), for the kernels of this folder.

e4m3 to float16 is exact and one instruction a pair, so queries and weights are float16 there too. Of a bfloat16 query
that is exact between 6e-5 and 65504; beyond, it is 65504, below it loses bits that no score shows. A cache of the
query's own type costs no instruction. They are used once a tile of keys. They know no block and no mask.
"""

import triton
import triton.language as tl


@triton.jit
def query_operand(query_tile, cache):
    """`query_tile` in the type that it is multiplied with keys of `cache` in. NaN stays NaN."""
    if cache.dtype.element_ty == tl.float8e4nv and query_tile.dtype == tl.bfloat16:
        query_tile = query_tile.to(tl.float32)
        query_tile = tl.where(query_tile > 65504.0, 65504.0, query_tile)
        query_tile = tl.where(query_tile < -65504.0, -65504.0, query_tile).to(tl.float16)
    return query_tile
