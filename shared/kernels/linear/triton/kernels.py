"""Triton kernel of `quire::linears` for few rows: one pass over the weights of a group, in tiles that keep the memory busy.

Shape suffixes: M rows of x, N outputs of a weight, K inputs. The weights are the large operand, so a tile of them is the left side
of the product and the rows, padded to 16, the right one.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (kernels are compiled from their source; their arguments are no Python types)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _operand(x, WIDE: tl.constexpr):
    """`x` as an operand of tl.dot. WIDE: as float32, because the interpreter's dot takes bfloat16's bits for integers."""
    return x.to(tl.float32) if WIDE else x


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x,
    weight0,
    weight1,
    weight2,
    out0,
    out1,
    out2,
    rows,
    x_stride,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out_i [rows, N_i] = x [rows, K] @ weight_i [N_i, K]^T. Grid: tiles of BLOCK_N outputs, of weight 0, then 1, then 2."""
    tile = tl.program_id(0)
    first1 = (N0 + BLOCK_N - 1) // BLOCK_N
    first2 = first1 + (N1 + BLOCK_N - 1) // BLOCK_N
    weight, out, width, first = weight0, out0, N0, 0
    if tile >= first2:
        weight, out, width, first = weight2, out2, N2, first2
    elif tile >= first1:
        weight, out, width, first = weight1, out1, N1, first1
    n = (tile - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    # Outputs past the end read the last row again and are not stored; so no load of weights needs a mask.
    weight_at = weight + tl.minimum(n, width - 1).to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + (m * x_stride)[None, :] + k[:, None]
    live = (m < rows)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for _ in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        tile_NK = tl.load(weight_at)
        x_KM = tl.load(x_at, mask=live, other=0.0)
        acc = tl.dot(_operand(tile_NK, WIDE), _operand(x_KM, WIDE), acc)
        weight_at += BLOCK_K
        x_at += BLOCK_K
    to = out + (m * width)[None, :] + n[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=live & (n < width)[:, None])
