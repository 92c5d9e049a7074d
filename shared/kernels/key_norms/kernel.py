"""Triton kernel of the norms of keys that lie on the pages of one sequence.

Shape suffixes: T tokens of a tile, D head_dim padded to a power of two.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (kernels are compiled from their source; their arguments are no Python types)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "length"])
def key_norms_kernel(
    pool_pointers,
    page_index,
    out,
    heads,
    length,
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out [layers * heads, length] float32. Grid: (tiles of BLOCK_T tokens, layers * heads with the head fastest)."""
    row = tl.program_id(1)
    # Pool addresses come from memory, so their alignment has to be told.
    pool = tl.multiple_of(tl.load(pool_pointers + row // heads).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live_T = token_T < length
    page_T = tl.load(page_index + token_T // PAGE_SIZE, mask=live_T, other=0)
    cell_T = page_T * PAGE_STRIDE + (row % heads).to(tl.int64) * HEAD_STRIDE + (token_T % PAGE_SIZE) * TOKEN_STRIDE
    dim_D = tl.arange(0, BLOCK_D)
    mask_TD = live_T[:, None] & (dim_D < HEAD_DIM)[None, :]
    key_TD = tl.load(pool + cell_T[:, None] + dim_D[None, :], mask=mask_TD, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * length + token_T, tl.sqrt(tl.sum(key_TD * key_TD, axis=1)), mask=live_T)
