"""Triton kernels of both attention ops. One body serves decode (few query rows, cells split over programs) and prefill.

Query i of head g of a group is row `i * GROUP + g` of a (row, kv head): keys and values are loaded once for all heads that share
them, and a tile's rows ascend in position. Offsets into pools are 64-bit; strides are arguments, so both layouts and padded pools
are one kernel. Scores carry a factor log2(e): weights are powers of two.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (kernels are compiled from their source; their arguments are no Python types)

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["count", "table_stride", "k_batch", "v_batch"], do_not_specialize_on_alignment=["table", "start"])
def write_kernel(
    k,
    v,
    pool,
    table,
    start,
    count,
    table_stride,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    page_stride,
    kv_stride,
    head_stride,
    token_stride,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Copy rows `k, v [B, K, count, DIM]` to cells start .. start + count. Grid: (blocks of BLOCK_N rows, kv heads, batch)."""
    head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    live = token < count
    mask = live[:, None] & (d < DIM)[None, :]
    cell = tl.load(start + b) + token
    page = tl.load(table + b * table_stride + cell // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    to = pool + (page * page_stride + head * head_stride + (cell % PAGE_SIZE) * token_stride)[:, None] + d[None, :]
    token = token.to(tl.int64)
    keys = tl.load(k + b * k_batch + head * k_head + (token * k_token)[:, None] + d[None, :], mask=mask)
    values = tl.load(v + b * v_batch + head * v_head + (token * v_token)[:, None] + d[None, :], mask=mask)
    tl.store(to, keys, mask=mask)
    tl.store(to + kv_stride, values, mask=mask)


@triton.jit
def _operand(x, WIDE: tl.constexpr):
    """`x` as an operand of tl.dot. WIDE: as float32, because the interpreter's dot takes bfloat16's bits for integers."""
    return x.to(tl.float32) if WIDE else x


@triton.jit
def _attend_cells(
    acc,
    top,
    total,
    q,
    own,
    keys,
    values,
    table,
    begin,
    end,
    first_cell,
    past_cell,
    scale,
    k_page,
    k_token,
    v_page,
    v_token,
    PAGE_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to blocks begin .. end of BLOCK_N cells; unless MASKED every row sees all of them. Updates acc, top and total."""
    d = tl.arange(0, BLOCK_D)
    for block in range(begin, end):
        cell = block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (cell >= first_cell) & (cell < past_cell) if MASKED else cell >= 0
        if PAGED:
            page = tl.load(table + cell // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
            token = cell % PAGE_SIZE
            key_at = page * k_page + token * k_token
            value_at = page * v_page + token * v_token
        else:
            key_at = cell.to(tl.int64) * k_token
            value_at = cell.to(tl.int64) * v_token
        if MASKED or DIM != BLOCK_D:
            mask = inside[:, None] & (d < DIM)[None, :]
            key = tl.load(keys + key_at[:, None] + d[None, :], mask=mask, other=0.0)
        else:
            key = tl.load(keys + key_at[:, None] + d[None, :])
        scores = tl.dot(_operand(q, WIDE), tl.trans(_operand(key, WIDE)), input_precision="ieee") * scale
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both ends
            scores = SOFTCAP * LOG2_E * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E / SOFTCAP)) + 1))
        if MASKED:
            seen = inside[None, :] & (cell[None, :] <= own[:, None])
            if WINDOW > 0:
                seen = seen & (cell[None, :] > own[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        best = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet keeps weights of zero, not of -inf - -inf.
        base = tl.where(best == float("-inf"), 0.0, best) if MASKED else best
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if MASKED or DIM != BLOCK_D:
            value = tl.load(values + value_at[:, None] + d[None, :], mask=mask, other=0.0)
        else:
            value = tl.load(values + value_at[:, None] + d[None, :])
        acc = tl.dot(_operand(weights.to(value.dtype), WIDE), _operand(value, WIDE), acc, input_precision="ieee")
        top = best
    return acc, top, total


@triton.jit(
    do_not_specialize=["count", "table_stride", "q_batch", "out_batch", "k_batch", "v_batch"],
    do_not_specialize_on_alignment=["table", "start"],
)
def attend_kernel(
    q,
    k,
    v,
    out,
    partial,
    stats,
    table,
    start,
    sinks,
    scale,
    count,
    table_stride,
    q_batch,
    q_head,
    q_token,
    k_page,
    k_head,
    k_token,
    v_page,
    v_head,
    v_token,
    out_batch,
    out_head,
    out_token,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rows of one (batch row, kv head) against one of SPLITS shares of their visible cells.

    Grid: (row blocks * SPLITS, kv heads, batch). With one split it writes `out`; with more, float32 shares of it: unnormalised sums
    to `partial [B, H, count, SPLITS, DIM]`, largest scores and sums of weights to `stats [2, B, H, count, SPLITS]`.
    """
    kv_head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    split = tl.program_id(0) % SPLITS
    # The last rows see most cells: they go first.
    first_row = (tl.num_programs(0) // SPLITS - 1 - tl.program_id(0) // SPLITS) * BLOCK_M
    origin = tl.load(start + b)

    row = first_row + tl.arange(0, BLOCK_M)
    live = row < count * GROUP
    token = row // GROUP
    own = origin + token
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    row_mask = live[:, None] & (d < DIM)[None, :]
    query = tl.load(q + b * q_batch + (head * q_head + token * q_token)[:, None] + d[None, :], mask=row_mask, other=0.0)

    # Blocks with a cell that some row sees, this split's share of them, and within that the blocks that every row sees whole.
    first_token = first_row // GROUP
    past_token = tl.minimum((first_row + BLOCK_M - 1) // GROUP + 1, count)
    past_cell = origin + past_token
    first_cell = 0
    if WINDOW > 0:
        first_cell = tl.maximum(origin + first_token + 1 - WINDOW, 0)
    first_block = first_cell // BLOCK_N
    blocks = tl.cdiv(past_cell, BLOCK_N) - first_block
    begin = first_block + blocks * split // SPLITS
    end = first_block + blocks * (split + 1) // SPLITS
    whole_begin = begin
    if WINDOW > 0:
        whole_begin = tl.maximum(tl.minimum(tl.cdiv(tl.maximum(origin + past_token - WINDOW, 0), BLOCK_N), end), begin)
    whole_end = tl.maximum(tl.minimum((origin + first_token + 1) // BLOCK_N, end), whole_begin)

    table_row = table
    keys = k + kv_head.to(tl.int64) * k_head
    values = v + kv_head.to(tl.int64) * v_head
    if PAGED:
        table_row = table + b * table_stride
    else:
        keys += b * k_page
        values += b * v_page

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if WINDOW > 0:
        acc, top, total = _attend_cells(
            acc, top, total, query, own, keys, values, table_row, begin, whole_begin, first_cell, past_cell, scale,
            k_page, k_token, v_page, v_token, PAGE_SIZE, PAGED, WINDOW, SOFTCAP, DIM, BLOCK_D, BLOCK_N, WIDE, True,
        )  # fmt: skip
    acc, top, total = _attend_cells(
        acc, top, total, query, own, keys, values, table_row, whole_begin, whole_end, first_cell, past_cell, scale,
        k_page, k_token, v_page, v_token, PAGE_SIZE, PAGED, WINDOW, SOFTCAP, DIM, BLOCK_D, BLOCK_N, WIDE, False,
    )  # fmt: skip
    acc, top, total = _attend_cells(
        acc, top, total, query, own, keys, values, table_row, whole_end, end, first_cell, past_cell, scale,
        k_page, k_token, v_page, v_token, PAGE_SIZE, PAGED, WINDOW, SOFTCAP, DIM, BLOCK_D, BLOCK_N, WIDE, True,
    )  # fmt: skip

    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
            total += tl.exp2(sink - top)
        result = acc / total[:, None]
        to = out + b * out_batch + (head * out_head + token * out_token)[:, None] + d[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=row_mask)
    else:
        heads = tl.num_programs(1) * GROUP
        part = ((b * heads + head) * count + token) * SPLITS + split
        tl.store(partial + part[:, None] * DIM + d[None, :], acc, mask=row_mask)
        tl.store(stats + part, top, mask=live)
        tl.store(stats + tl.num_programs(2).to(tl.int64) * heads * count * SPLITS + part, total, mask=live)


@triton.jit(do_not_specialize=["count", "rows", "out_batch"])
def reduce_kernel(
    partial,
    stats,
    sinks,
    out,
    rows,
    heads,
    count,
    out_batch,
    out_head,
    out_token,
    SINKS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Join the shares of one output row. Grid: batch * heads * count rows. BLOCK_S: SPLITS rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    token = row % count
    head = row // count % heads
    b = row // count // heads
    split = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    part = row * SPLITS + split
    top = tl.load(stats + part, mask=split < SPLITS, other=float("-inf"))
    total = tl.load(stats + rows.to(tl.int64) * SPLITS + part, mask=split < SPLITS, other=0.0)
    mask = (split < SPLITS)[:, None] & (d < DIM)[None, :]
    acc = tl.load(partial + part[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    best = tl.max(top, 0)
    share = tl.exp2(top - best)
    weight = tl.sum(total * share, 0)
    if SINKS:
        weight += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - best)
    result = tl.sum(acc * share[:, None], 0) / weight
    to = out + b * out_batch + head * out_head + token * out_token + d
    tl.store(to, result.to(out.dtype.element_ty), mask=d < DIM)
