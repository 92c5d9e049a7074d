"""Pack: turns decisions and lengths into lists of moves, in physical cells, that the move kernel executes without thinking.

One program a (request, list row). It writes, for its list (`row = list_row * batch + request`):

    src_cells, dst_cells  [list_rows, batch, capacity]      move i copies cell src to cell dst (cell = page * page_size + slot);
                                                            src -1: zeros; dst -1: nothing to do
    spans                 [list_rows, batch, 3]             begin, ordered_end, end: moves begin..ordered_end must run in order,
                                                            moves ordered_end..end are independent of everything
    waits                 [list_rows, batch, tiles, 2]      ordered mode: tile t of tile_rows moves (from begin on) stores over
                                                            sources of tiles first..last of its own list, last < t

Cells are checked against the table and the pool here, so the move kernel cannot leave its pool whatever the inputs say.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (kernels are compiled from their source; their arguments are no Python types)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _lower_bound(ordinals, count, bound, steps):
    """How many of the ascending `ordinals[0..count]` are below each of `bound`."""
    low = tl.zeros_like(bound)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        below = tl.load(ordinals + middle, mask=searching, other=0) < bound
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & ~below, middle, high)
    return low


@triton.jit
def _holes(ordinals, count, base, nth, steps):
    """The nth (from 0) ordinal from `base` on that is not among the ascending `ordinals[0..count]`.

    `ordinals[k] - base - k` holes lie before entry k, a number that never falls with k.
    """
    low = tl.zeros_like(nth)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        before = tl.load(ordinals + middle, mask=searching, other=0) - base - middle <= nth
        low = tl.where(searching & before, middle + 1, low)
        high = tl.where(searching & ~before, middle, high)
    return base + nth + low


@triton.jit
def _cells(table, ordinal, wanted, max_pages, num_pages, page_size):
    """The cell of each ordinal, -1 where it has none or is not wanted."""
    inside = wanted & (ordinal >= 0) & (ordinal < max_pages * page_size)
    page = tl.load(table + ordinal // page_size, mask=inside, other=-1)
    return tl.where((page >= 0) & (page < num_pages), page * page_size + ordinal % page_size, -1)


@triton.jit(
    do_not_specialize=[
        "batch",
        "decision_rows",
        "keep_capacity",
        "tail_capacity",
        "capacity",
        "table_stride",
        "max_pages",
        "num_pages",
        "page_size",
        "layer_step",
        "window",
        "tiles",
        "tile_rows",
        "steps",
    ]
)
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
    batch,
    decision_rows,
    keep_capacity,
    tail_capacity,
    capacity,
    table_stride,
    max_pages,
    num_pages,
    page_size,
    layer_step,
    window,
    tiles,
    tile_rows,
    steps,
    MASKED: tl.constexpr,
    HOLE_FILLING: tl.constexpr,
    SCRUB: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (requests, list rows). `steps`: halvings that bring keep_capacity to nothing."""
    request = tl.program_id(0)
    list_row = tl.program_id(1)
    if (request == 0) & (list_row == 0):
        tl.store(epoch, tl.load(epoch) + 1)
    row = list_row.to(tl.int64) * batch + request
    span = spans + row * 3

    moves = tl.load(move_offsets + request + 1) - tl.load(move_offsets + request)
    if CHECKED:
        moves = tl.where(tl.load(fault_key) >= 0, 0, moves)
    keep = tl.minimum(tl.maximum(moves - tl.load(target_tail + request), 0), keep_capacity)
    if MASKED:
        moves = tl.where(keep < window, 0, moves)
    if moves <= 0:
        tl.store(span, 0)
        tl.store(span + 1, 0)
        tl.store(span + 2, 0)
        return

    base = tl.load(bases + request)
    valid_len = tl.load(valid_lengths + request)
    tail = tl.minimum(tl.maximum(tl.load(tail_lengths + request), 0), tail_capacity)
    end = base + keep
    scrubbed = 0
    if SCRUB:
        page_end = (end + tail + page_size - 1) // page_size * page_size
        scrubbed = tl.minimum(tl.maximum(tl.minimum(page_end, valid_len + tail) - end - tail, 0), page_size - 1)

    in_layer = tl.maximum(layer_step, 1)
    layer = tl.where(layer_step > 0, list_row // in_layer, 0)
    decision = tl.load(first_rows + layer) + list_row - layer * layer_step
    ordinals = kept + (request.to(tl.int64) * decision_rows + decision) * keep_capacity
    table = tables + request.to(tl.int64) * table_stride
    src_list = src_cells + row * capacity
    dst_list = dst_cells + row * capacity
    lane = tl.arange(0, BLOCK)

    if HOLE_FILLING:
        staying = tl.max(_lower_bound(ordinals, keep, tl.full([1], 0, tl.int32) + end, steps), axis=0)
        survivors = keep - staying
        # Survivors that lie where the tail or the zeros go leave first, in the ordered part.
        written_to = tl.full([1], 0, tl.int32) + end + tail + scrubbed
        linked = tl.maximum(tl.max(_lower_bound(ordinals, keep, written_to, steps), axis=0) - staying, 0)
        ordered_end = linked + tail + scrubbed
        total = survivors + tail + scrubbed
        for start in range(0, total, BLOCK):
            i = start + lane
            is_tail = (i >= linked) & (i < linked + tail)
            is_zero = (i >= linked + tail) & (i < ordered_end)
            nth = tl.where(i < linked, i, i - tail - scrubbed)
            is_survivor = (i < total) & ~is_tail & ~is_zero
            src = tl.load(ordinals + staying + nth, mask=is_survivor, other=0)
            dst = _holes(ordinals, staying, base, nth, steps)
            src = tl.where(is_tail, valid_len + i - linked, src)
            dst = tl.where(is_survivor, dst, end + i - linked)
            _emit(src_list, dst_list, table, i, src, dst, is_zero, i < total, max_pages, num_pages, page_size)
        tl.store(span, 0)
        tl.store(span + 1, ordered_end)
        tl.store(span + 2, total)
    else:
        survivors = keep
        if MASKED:
            survivors = window
        first_dst = end - survivors
        copied = survivors + tail
        total = copied + scrubbed
        begin = 0
        for start in range(0, total, BLOCK):
            i = start + lane
            src = valid_len + i - survivors
            if not MASKED:
                src = tl.where(i < keep, tl.load(ordinals + i, mask=i < keep, other=0), src)
            begin += tl.sum(((src == first_dst + i) & (i < copied)).to(tl.int32), axis=0)
            _emit(src_list, dst_list, table, i, src, first_dst + i, i >= copied, i < total, max_pages, num_pages, page_size)
        tl.store(span, begin)
        tl.store(span + 1, total)
        tl.store(span + 2, total)
        for start in range(0, tiles, BLOCK):
            tile = start + lane
            low = first_dst + begin + tile * tile_rows
            first = _sources_below(ordinals, low, keep, valid_len, tail, window, MASKED, steps) - begin
            last = _sources_below(ordinals, low + tile_rows, keep, valid_len, tail, window, MASKED, steps) - begin - 1
            wait = waits + (row * tiles + tile) * 2
            tl.store(wait, tl.maximum(first, 0) // tile_rows, mask=tile < tiles)
            last = tl.where(last < 0, -1, tl.minimum(last // tile_rows, tile - 1))
            tl.store(wait + 1, last, mask=tile < tiles)


@triton.jit
def _sources_below(ordinals, bound, keep, valid_len, tail, window, MASKED: tl.constexpr, steps):
    """How many moves of an ordered list have a source below `bound`."""
    if MASKED:
        return tl.minimum(tl.maximum(bound - valid_len + window, 0), window + tail)
    in_tail = tl.minimum(tl.maximum(bound - valid_len, 0), tail)
    return _lower_bound(ordinals, keep, bound, steps) + in_tail


@triton.jit
def _emit(src_list, dst_list, table, i, src, dst, is_zero, live, max_pages, num_pages, page_size):
    """Write moves i of a list in cells; identity moves and moves to or from nowhere come to nothing."""
    wanted = live & (is_zero | (src != dst))
    src_cell = _cells(table, src, wanted & ~is_zero, max_pages, num_pages, page_size)
    dst_cell = _cells(table, dst, wanted & (is_zero | (src_cell >= 0)), max_pages, num_pages, page_size)
    tl.store(src_list + i, tl.where(dst_cell >= 0, src_cell, -1), mask=live)
    tl.store(dst_list + i, dst_cell, mask=live)
