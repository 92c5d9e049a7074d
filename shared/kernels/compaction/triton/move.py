"""Move: executes packed lists of moves on the K and V rows of one (request, layer, head) each. Rows are bytes.

A tile is as many moves as fit BLOCK vectors of WIDTH elements, ROW_VECTORS to a row (so rows whose length is no power of two waste
no lanes); it is loaded whole before any of it is stored. Three ways to share out the work:

    walk    one program walks an ordered list front to back; the next tile's loads are in flight while this one is stored, which
            is safe because a store only clobbers sources of its own or earlier tiles
    split   one program a tile, for too few lists to fill the chip: it publishes that its loads are done, waits for the (at most
            two) earlier tiles whose sources its stores clobber, then stores
    free    independent moves, strided over as many programs as fill the chip; the first of them walks what must be in order

NOTE split needs blocks to start in the order of their index (or all to be resident), as CUB's single-pass scan does: a program
waits only for programs of a lower index, and no program waits before it has published.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# (kernels are compiled from their source; their arguments are no Python types)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(
    keys,
    cell,
    PAGE_SIZE: tl.constexpr,
    ROW_VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
):
    """Pointers `[BLOCK, WIDTH]` to each vector's elements in the K row of its cell `[BLOCK]`."""
    column = tl.arange(0, BLOCK) % ROW_VECTORS * WIDTH
    start = (cell // PAGE_SIZE).to(tl.int64) * PAGE_STRIDE + (cell % PAGE_SIZE) * TOKEN_STRIDE + column
    return keys + start[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _load_tile(
    keys,
    src_cells,
    dst_cells,
    move,
    end,
    PAGE_SIZE: tl.constexpr,
    ROW_VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
):
    """Moves `move..end`, at most a tile: destination cell (-1: none) of each vector `[BLOCK]`, K and V bytes `[BLOCK, WIDTH]`."""
    row = tl.arange(0, BLOCK) // ROW_VECTORS
    live = (row < BLOCK // ROW_VECTORS) & (move + row < end)
    src = tl.load(src_cells + move + row, mask=live, other=-1)
    dst = tl.load(dst_cells + move + row, mask=live, other=-1)
    source = _rows(keys, src, PAGE_SIZE, ROW_VECTORS, WIDTH, BLOCK, PAGE_STRIDE, TOKEN_STRIDE)
    key = tl.load(source, mask=(src >= 0)[:, None], other=0)
    value = tl.load(source + KV_STRIDE, mask=(src >= 0)[:, None], other=0)
    return dst, key, value


@triton.jit
def _store_tile(
    keys,
    dst,
    key,
    value,
    PAGE_SIZE: tl.constexpr,
    ROW_VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
):
    destination = _rows(keys, dst, PAGE_SIZE, ROW_VECTORS, WIDTH, BLOCK, PAGE_STRIDE, TOKEN_STRIDE)
    tl.store(destination, key, mask=(dst >= 0)[:, None])
    tl.store(destination + KV_STRIDE, value, mask=(dst >= 0)[:, None])


@triton.jit
def _keys_of(pool_pointers, layer, head, UNIT: tl.constexpr, HEAD_STRIDE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Where the K rows of a layer's head start. Pool addresses come from memory, so their alignment has to be told."""
    pool = tl.load(pool_pointers + layer).to(tl.pointer_type(UNIT))
    return tl.multiple_of(pool, ALIGNMENT) + head.to(tl.int64) * HEAD_STRIDE


@triton.jit(do_not_specialize=["requests", "batch", "heads", "capacity", "layer_step", "head_step", "programs"])
def walk_kernel(
    pool_pointers,
    src_cells,
    dst_cells,
    spans,
    requests,
    batch,
    heads,
    capacity,
    layer_step,
    head_step,
    programs,
    FREE: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW_VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
):
    """Grid: layers * requests * heads lists (head fastest) * programs (fastest of all; 1 unless FREE)."""
    TILE_ROWS: tl.constexpr = BLOCK // ROW_VECTORS
    program = tl.program_id(0) % programs
    list_index = tl.program_id(0) // programs
    head = list_index % heads
    request = list_index // heads % requests
    layer = list_index // heads // requests
    keys = _keys_of(pool_pointers, layer, head, UNIT, HEAD_STRIDE, ALIGNMENT)
    row = (layer * layer_step + head * head_step).to(tl.int64) * batch + request
    src_list = src_cells + row * capacity
    dst_list = dst_cells + row * capacity
    begin = tl.load(spans + row * 3)
    ordered_end = tl.load(spans + row * 3 + 1)
    walked_end = tl.where(program == 0, ordered_end, begin)

    dst, key, value = _load_tile(
        keys, src_list, dst_list, begin, walked_end, PAGE_SIZE, ROW_VECTORS, WIDTH, BLOCK, PAGE_STRIDE, KV_STRIDE, TOKEN_STRIDE
    )
    for move in range(begin + TILE_ROWS, walked_end + TILE_ROWS, TILE_ROWS):
        next_dst, next_key, next_value = _load_tile(
            keys, src_list, dst_list, move, walked_end, PAGE_SIZE, ROW_VECTORS, WIDTH, BLOCK, PAGE_STRIDE, KV_STRIDE, TOKEN_STRIDE
        )
        tl.debug_barrier()  # every thread's loads of the tile come before any thread's stores of it
        _store_tile(keys, dst, key, value, PAGE_SIZE, ROW_VECTORS, WIDTH, BLOCK, PAGE_STRIDE, KV_STRIDE, TOKEN_STRIDE)
        dst, key, value = next_dst, next_key, next_value

    if FREE:
        end = tl.load(spans + row * 3 + 2)
        for move in range(ordered_end + program * TILE_ROWS, end, programs * TILE_ROWS):
            dst, key, value = _load_tile(
                keys, src_list, dst_list, move, end, PAGE_SIZE, ROW_VECTORS, WIDTH, BLOCK, PAGE_STRIDE, KV_STRIDE, TOKEN_STRIDE
            )
            _store_tile(keys, dst, key, value, PAGE_SIZE, ROW_VECTORS, WIDTH, BLOCK, PAGE_STRIDE, KV_STRIDE, TOKEN_STRIDE)


@triton.jit(do_not_specialize=["requests", "batch", "heads", "capacity", "layer_step", "head_step", "layers", "tiles"])
def split_kernel(
    pool_pointers,
    src_cells,
    dst_cells,
    spans,
    waits,
    loaded,
    epoch,
    requests,
    batch,
    heads,
    capacity,
    layer_step,
    head_step,
    layers,
    tiles,
    UNIT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW_VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
):
    """Grid: tiles * layers * requests * heads lists (head fastest, tile slowest: what a tile waits for was started long before).

    `loaded` [lists, tiles] holds the round (`epoch`) in which each tile was last loaded, so it never needs clearing.
    """
    TILE_ROWS: tl.constexpr = BLOCK // ROW_VECTORS
    lists = layers * requests * heads
    tile = tl.program_id(0) // lists
    list_index = tl.program_id(0) % lists
    head = list_index % heads
    request = list_index // heads % requests
    layer = list_index // heads // requests
    row = (layer * layer_step + head * head_step).to(tl.int64) * batch + request
    move = tl.load(spans + row * 3) + tile * TILE_ROWS
    end = tl.load(spans + row * 3 + 1)
    if move >= end:
        return
    keys = _keys_of(pool_pointers, layer, head, UNIT, HEAD_STRIDE, ALIGNMENT)
    this_round = tl.load(epoch)
    first = tl.load(waits + (row * tiles + tile) * 2)
    last = tl.load(waits + (row * tiles + tile) * 2 + 1)
    dst, key, value = _load_tile(
        keys,
        src_cells + row * capacity,
        dst_cells + row * capacity,
        move,
        end,
        PAGE_SIZE,
        ROW_VECTORS,
        WIDTH,
        BLOCK,
        PAGE_STRIDE,
        KV_STRIDE,
        TOKEN_STRIDE,
    )
    published = loaded + list_index.to(tl.int64) * tiles
    tl.debug_barrier()  # the release below speaks for every thread's loads
    tl.atomic_xchg(published + tile, this_round, sem="release")
    for other in range(first, last + 1):
        while tl.atomic_or(published + other, 0, sem="acquire") != this_round:
            pass
    tl.debug_barrier()  # no thread stores before the acquire
    _store_tile(keys, dst, key, value, PAGE_SIZE, ROW_VECTORS, WIDTH, BLOCK, PAGE_STRIDE, KV_STRIDE, TOKEN_STRIDE)
