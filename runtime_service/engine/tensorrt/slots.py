"""Which rows of a batch one launch can serve: an engine's rows are neighbouring slots of the pool, in order.

The engine's caches are `[rows, kv_heads, max_len, head_dim]`, bound to the pool from some slot on, so a launch covers consecutive
slots and writes to every one of them. A batch is therefore served in as few launches as it has gaps; no slot that is not
in the batch is ever bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime_service.kv.allocator import DUMP_PAGE
from shared.bindings import BLOCK_TABLE
from shared.errors import FieldOutOfRange


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Rows `rows` of a batch, in this order, lie in slots `first_slot .. first_slot + len(rows)`."""

    first_slot: int
    rows: tuple[int, ...]


def slot_runs(slots: Sequence[int], max_rows: int) -> list[SlotRun]:
    """The launches for a batch whose row `b` lies in slot `slots[b]`. Padding rows (in DUMP_PAGE) need none.

    FieldOutOfRange when two rows share a slot: one launch would write it twice.
    """
    order = sorted((slot, row) for row, slot in enumerate(slots) if slot != DUMP_PAGE)
    runs: list[SlotRun] = []
    for slot, row in order:
        last = runs[-1] if runs else None
        end = last.first_slot + len(last.rows) if last else None
        if end is not None and slot < end:
            raise FieldOutOfRange(f"slot {slot} is the cache of two rows; every row needs its own", field=BLOCK_TABLE)
        if last is not None and slot == end and len(last.rows) < max_rows:
            runs[-1] = SlotRun(last.first_slot, (*last.rows, row))
        else:
            runs.append(SlotRun(slot, (row,)))
    return runs
