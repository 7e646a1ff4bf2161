"""Query operands for attention over an 8-bit cache (kernels/fp8_kv.py).

e4m3 to float16 is exact and one instruction per pair, so queries and weights become float16, too. A bfloat16 query
converts exactly between 6e-5 and 65504; larger values become 65504, smaller ones lose bits that no score shows. A cache
of the query's own dtype costs no instruction.
"""

import triton
import triton.language as tl


@triton.jit
def query_operand(query_tile, cache):
    """Convert `query_tile` to the dtype in which it is multiplied with keys of `cache`. NaN stays NaN."""
    if cache.dtype.element_ty == tl.float8e4nv and query_tile.dtype == tl.bfloat16:
        query_tile = query_tile.to(tl.float32)
        query_tile = tl.where(query_tile > 65504.0, 65504.0, query_tile)
        query_tile = tl.where(query_tile < -65504.0, -65504.0, query_tile).to(tl.float16)
    return query_tile
