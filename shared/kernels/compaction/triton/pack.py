"""Pack: turns decisions and lengths into lists of moves, in physical cells, that the move kernel executes without thinking.

One program a (request, list row). It writes, for its list (`row = list_row * batch + request`):

    src_cells, dst_cells  [list_rows, batch, CAPACITY]      move i copies cell src to cell dst (cell = page * page_size + slot);
                                                            src -1: zeros; dst -1: nothing to do
    spans                 [list_rows, batch, 3]             begin, ordered_end, end: moves begin..ordered_end must run in order,
                                                            moves ordered_end..end are independent of everything
    waits                 [list_rows, batch, TILES, 2]      ordered mode: tile t of TILE_ROWS moves (from begin on) stores over
                                                            sources of tiles first..last of its own list, last < t

Cells are checked against the table and the pool here, so the move kernel cannot leave its pool whatever the inputs say.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (kernels are compiled from their source; their arguments are no Python types)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _lower_bound(ordinals, count, bound, STEPS: tl.constexpr):
    """How many of the ascending `ordinals[0..count]` are below each of `bound`."""
    low = tl.zeros_like(bound)
    high = low + count
    for _ in range(STEPS):
        middle = (low + high) // 2
        searching = low < high
        below = tl.load(ordinals + middle, mask=searching, other=0) < bound
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & ~below, middle, high)
    return low


@triton.jit
def _holes(ordinals, count, base, nth, STEPS: tl.constexpr):
    """The nth (from 0) ordinal from `base` on that is not among the ascending `ordinals[0..count]`.

    `ordinals[k] - base - k` holes lie before entry k, a number that never falls with k.
    """
    low = tl.zeros_like(nth)
    high = low + count
    for _ in range(STEPS):
        middle = (low + high) // 2
        searching = low < high
        before = tl.load(ordinals + middle, mask=searching, other=0) - base - middle <= nth
        low = tl.where(searching & before, middle + 1, low)
        high = tl.where(searching & ~before, middle, high)
    return base + nth + low


@triton.jit
def _cells(table, ordinal, wanted, MAX_PAGES: tl.constexpr, NUM_PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The cell of each ordinal, -1 where it has none or is not wanted."""
    inside = wanted & (ordinal >= 0) & (ordinal < MAX_PAGES * PAGE_SIZE)
    page = tl.load(table + ordinal // PAGE_SIZE, mask=inside, other=-1)
    return tl.where((page >= 0) & (page < NUM_PAGES), page * PAGE_SIZE + ordinal % PAGE_SIZE, -1)


@triton.jit
def pack_kernel(
    kept,
    move_offsets,
    target_tail,
    tail_lengths,
    bases,
    valid_lengths,
    tables,
    first_rows,
    fault_key,
    src_cells,
    dst_cells,
    spans,
    waits,
    epoch,
    BATCH: tl.constexpr,
    DECISION_ROWS: tl.constexpr,
    KEEP_CAPACITY: tl.constexpr,
    TAIL_CAPACITY: tl.constexpr,
    CAPACITY: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LAYER_STEP: tl.constexpr,
    WINDOW: tl.constexpr,
    HOLE_FILLING: tl.constexpr,
    SCRUB: tl.constexpr,
    CHECKED: tl.constexpr,
    WAITS: tl.constexpr,
    TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    list_row = tl.program_id(1)
    if (request == 0) & (list_row == 0):
        tl.store(epoch, tl.load(epoch) + 1)
    row = list_row.to(tl.int64) * BATCH + request
    span = spans + row * 3

    moves = tl.load(move_offsets + request + 1) - tl.load(move_offsets + request)
    if CHECKED:
        moves = tl.where(tl.load(fault_key) >= 0, 0, moves)
    keep = tl.minimum(tl.maximum(moves - tl.load(target_tail + request), 0), KEEP_CAPACITY)
    if WINDOW > 0:
        moves = tl.where(keep < WINDOW, 0, moves)
    if moves <= 0:
        tl.store(span, 0)
        tl.store(span + 1, 0)
        tl.store(span + 2, 0)
        return

    base = tl.load(bases + request)
    valid_len = tl.load(valid_lengths + request)
    tail = tl.minimum(tl.maximum(tl.load(tail_lengths + request), 0), TAIL_CAPACITY)
    end = base + keep
    scrubbed = 0
    if SCRUB:
        page_end = (end + tail + PAGE_SIZE - 1) // PAGE_SIZE * PAGE_SIZE
        scrubbed = tl.minimum(tl.maximum(tl.minimum(page_end, valid_len + tail) - end - tail, 0), PAGE_SIZE - 1)

    decision = tl.load(first_rows + (list_row // LAYER_STEP if LAYER_STEP > 0 else 0))
    decision += list_row % LAYER_STEP if LAYER_STEP > 0 else list_row
    ordinals = kept + (request.to(tl.int64) * DECISION_ROWS + decision) * KEEP_CAPACITY
    table = tables + request.to(tl.int64) * TABLE_STRIDE
    src_list = src_cells + row * CAPACITY
    dst_list = dst_cells + row * CAPACITY
    lane = tl.arange(0, BLOCK)

    if HOLE_FILLING:
        staying = tl.max(_lower_bound(ordinals, keep, tl.full([1], 0, tl.int32) + end, STEPS), axis=0)
        survivors = keep - staying
        # Survivors that lie where the tail or the zeros go leave first, in the ordered part.
        written_to = tl.full([1], 0, tl.int32) + end + tail + scrubbed
        linked = tl.max(_lower_bound(ordinals, keep, written_to, STEPS), axis=0) - staying
        ordered_end = linked + tail + scrubbed
        total = survivors + tail + scrubbed
        for start in range(0, total, BLOCK):
            i = start + lane
            is_tail = (i >= linked) & (i < linked + tail)
            is_zero = (i >= linked + tail) & (i < ordered_end)
            nth = tl.where(i < linked, i, i - tail - scrubbed)
            is_survivor = (i < total) & ~is_tail & ~is_zero
            src = tl.load(ordinals + staying + nth, mask=is_survivor, other=0)
            dst = _holes(ordinals, staying, base, nth, STEPS)
            src = tl.where(is_tail, valid_len + i - linked, src)
            dst = tl.where(is_survivor, dst, end + i - linked)
            _emit(src_list, dst_list, table, i, src, dst, is_zero, i < total, MAX_PAGES, NUM_PAGES, PAGE_SIZE)
        tl.store(span, 0)
        tl.store(span + 1, ordered_end)
        tl.store(span + 2, total)
    else:
        survivors = keep
        if WINDOW > 0:
            survivors = WINDOW
        first_dst = end - survivors
        copied = survivors + tail
        total = copied + scrubbed
        begin = 0
        for start in range(0, total, BLOCK):
            i = start + lane
            src = valid_len + i - survivors
            if WINDOW == 0:
                src = tl.where(i < keep, tl.load(ordinals + i, mask=i < keep, other=0), src)
            begin += tl.sum(((src == first_dst + i) & (i < copied)).to(tl.int32), axis=0)
            _emit(src_list, dst_list, table, i, src, first_dst + i, i >= copied, i < total, MAX_PAGES, NUM_PAGES, PAGE_SIZE)
        tl.store(span, begin)
        tl.store(span + 1, total)
        tl.store(span + 2, total)
        if WAITS:
            for start in range(0, TILES, BLOCK):
                tile = start + lane
                low = first_dst + begin + tile * TILE_ROWS
                first = _sources_below(ordinals, low, keep, valid_len, tail, WINDOW, STEPS) - begin
                last = _sources_below(ordinals, low + TILE_ROWS, keep, valid_len, tail, WINDOW, STEPS) - begin - 1
                wait = waits + (row * TILES + tile) * 2
                tl.store(wait, tl.maximum(first, 0) // TILE_ROWS, mask=tile < TILES)
                last = tl.where(last < 0, -1, tl.minimum(last // TILE_ROWS, tile - 1))
                tl.store(wait + 1, last, mask=tile < TILES)


@triton.jit
def _sources_below(ordinals, bound, keep, valid_len, tail, WINDOW: tl.constexpr, STEPS: tl.constexpr):
    """How many moves of an ordered list have a source below `bound`."""
    if WINDOW > 0:
        return tl.minimum(tl.maximum(bound - valid_len + WINDOW, 0), WINDOW + tail)
    in_tail = tl.minimum(tl.maximum(bound - valid_len, 0), tail)
    return _lower_bound(ordinals, keep, bound, STEPS) + in_tail


@triton.jit
def _emit(
    src_list,
    dst_list,
    table,
    i,
    src,
    dst,
    is_zero,
    live,
    MAX_PAGES: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Write moves i of a list in cells; identity moves and moves to or from nowhere come to nothing."""
    wanted = live & (is_zero | (src != dst))
    src_cell = _cells(table, src, wanted & ~is_zero, MAX_PAGES, NUM_PAGES, PAGE_SIZE)
    dst_cell = _cells(table, dst, wanted & (is_zero | (src_cell >= 0)), MAX_PAGES, NUM_PAGES, PAGE_SIZE)
    tl.store(src_list + i, tl.where(dst_cell >= 0, src_cell, -1), mask=live)
    tl.store(dst_list + i, dst_cell, mask=live)
