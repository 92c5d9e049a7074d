"""Reads and checks the header of a safetensors file before any of its data is believed.

bytes 0..8   little-endian length N of the header
bytes 8..8+N JSON: tensor name -> {"dtype", "shape", "data_offsets": [begin, end]}, offsets counted from 8+N
the rest     data: the tensors back to back, without holes
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import SourceInvalid, UnsafeSource

ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}
MAX_HEADER_BYTES = 100_000_000
_PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: its type by the format's own name (`F32`), its shape, its bytes `begin..end` in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """Tensors of `path` in file order.

    SourceInvalid, naming the tensor and both numbers, unless the header is whole, every size follows from dtype and shape, and
    the tensors fill the rest of the file exactly. UnsafeSource where the file is a pickle or a zip under a safetensors name.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(_PICKLE_STARTS):
            raise UnsafeSource(f"{path.name} is a pickled or zipped checkpoint under a safetensors name; it is not read")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise SourceInvalid(
                f"{path.name} declares a header of {length} bytes in a file of {size}: truncated or not safetensors"
            )
        raw = file.read(length)
    data_start = 8 + length
    entries = {name: _entry(path, name, fields, data_start) for name, fields in _tensors(path, raw)}
    _check_cover(path, entries, data_start, size)
    return dict(sorted(entries.items(), key=lambda item: item[1].begin))


def _tensors(path: Path, raw: bytes) -> list[tuple[str, Any]]:
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SourceInvalid(f"the header of {path.name} is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise SourceInvalid(f"the header of {path.name} must be a JSON object; got {type(header).__name__}")
    return [(name, fields) for name, fields in header.items() if name != "__metadata__"]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key is written twice")
    return fields


def _entry(path: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    where = f"tensor {name[:120]!r} of {path.name}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise SourceInvalid(f"{where} must have dtype, shape and data_offsets alone")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise SourceInvalid(f"{where} has dtype {str(dtype)[:40]!r}; known are {', '.join(ITEM_BYTES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise SourceInvalid(
            f"{where} must have a shape and two offsets of integers >= 0; got {str(shape)[:80]}, {str(offsets)[:80]}"
        )
    begin, end = offsets
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != expected:
        raise SourceInvalid(f"{where} is {dtype} {shape} = {expected} bytes, but its offsets {begin}..{end} hold {end - begin}")
    return TensorEntry(dtype, tuple(shape), data_start + begin, data_start + end)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and len(values) <= 8 and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def _check_cover(path: Path, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    """The tensors tile the data: an overlap, a hole, a cut tail and a trailing payload are all refused."""
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise SourceInvalid(f"tensor {name[:120]!r} of {path.name} begins at byte {entry.begin}; the one before ends at {end}")
        end = entry.end
    if end != size:
        raise SourceInvalid(f"{path.name} must be {end} bytes long by its header; it is {size}: truncated or overlong")
