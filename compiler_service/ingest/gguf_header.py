"""Reads and checks the header of a GGUF file (versions 2 and 3, little-endian) before any library trusts its sizes.

    magic "GGUF", version u32, tensor count u64, metadata count u64
    metadata      key string, type u32, value        string = length u64 + UTF-8; array = type u32 + count u64 + values
    tensor infos  name string, rank u32, dims u64 x rank (innermost first), type u32, offset u64
    padding to `general.alignment`, then data; offsets count from there

Every length is compared with what is left of the file before it is followed, so a lying one costs nothing.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from shared.errors import SourceInvalid, UnsupportedModel

DEFAULT_ALIGNMENT = 32
MAX_ENTRIES = 1 << 20
MAX_RANK = 4
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its shape outermost first (torch's order), its packed type and its bytes `begin..end` in the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ArrayLength:
    """A metadata array: only its length is kept; the tokenizer's arrays are long and read elsewhere."""

    count: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`metadata` holds scalars and strings as Python values and arrays as `ArrayLength`."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of `path`. SourceInvalid says what was declared and what the file holds; UnsupportedModel for unknown packings."""
    size = path.stat().st_size
    if size < 24:
        raise SourceInvalid(f"{path.name} has {size} bytes; a GGUF header alone takes 24")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _read(_Reader(data, path.name), size)


def _read(reader: _Reader, size: int) -> GgufHeader:
    magic = reader.bytes(4, "magic")
    if magic != b"GGUF":
        raise SourceInvalid(f"{reader.name} must begin with GGUF; it begins with {magic!r}")
    version = reader.number("<I", "version")
    if version not in (2, 3):
        raise SourceInvalid(f"{reader.name} must be GGUF version 2 or 3, little-endian; it says {version}")
    tensor_count = reader.count("tensor count", at_least_bytes=24)
    metadata_count = reader.count("metadata count", at_least_bytes=13)
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = reader.text("a metadata key")
        if key in metadata:
            raise SourceInvalid(f"{reader.name} has the metadata key {key[:120]!r} twice")
        metadata[key] = _value(reader, reader.number("<I", key), key)
    infos = [_tensor_info(reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
        raise SourceInvalid(f"general.alignment must be a power of two from 8 to 65536; got {str(alignment)[:40]!r}")
    data_start = -(-reader.at // alignment) * alignment
    return GgufHeader(metadata, _place(reader.name, infos, alignment, data_start, size))


class _Reader:
    """A cursor over the file that refuses to run past its end."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data, self.name, self.at = data, name, 0

    def bytes(self, length: int, what: str) -> bytes:
        if length > len(self.data) - self.at:
            raise SourceInvalid(
                f"{self.name}: {what[:120]} needs {length} bytes at offset {self.at}; the file ends at {len(self.data)}: "
                "truncated or corrupt"
            )
        self.at += length
        return self.data[self.at - length : self.at]

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.bytes(struct.calcsize(form), what))[0]

    def count(self, what: str, *, at_least_bytes: int, most: int = MAX_ENTRIES) -> int:
        """A number of entries that each take `at_least_bytes`, so the rest of the file bounds it."""
        count: int = self.number("<Q", what)
        if count > min(most, (len(self.data) - self.at) // at_least_bytes):
            raise SourceInvalid(
                f"{self.name}: {what[:120]} says {count} at offset {self.at}; the file ends at {len(self.data)}, and {most} is the "
                "most there may be: truncated or corrupt"
            )
        return count

    def text(self, what: str) -> str:
        raw = self.bytes(self.number("<Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise SourceInvalid(f"{self.name}: {what[:120]} is not UTF-8: {error}") from error


def _value(reader: _Reader, kind: int, key: str) -> Any:
    if kind in _SCALARS:
        return reader.number(_SCALARS[kind], key)
    if kind == _STRING:
        return reader.text(key)
    if kind != _ARRAY:
        raise SourceInvalid(f"{reader.name}: {key[:120]} has the unknown metadata type {kind}")
    item = reader.number("<I", key)
    if item in _SCALARS:
        width = struct.calcsize(_SCALARS[item])
        count = reader.count(key, at_least_bytes=width, most=1 << 32)
        reader.bytes(count * width, key)
    elif item == _STRING:
        count = reader.count(key, at_least_bytes=8, most=1 << 32)
        for _ in range(count):
            reader.bytes(reader.number("<Q", key), key)
    else:
        raise SourceInvalid(f"{reader.name}: {key[:120]} is an array of the type {item}; scalars and strings are known")
    return ArrayLength(count)


def _tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.text("a tensor name")
    rank = reader.number("<I", name)
    if not 1 <= rank <= MAX_RANK:
        raise SourceInvalid(f"{reader.name}: tensor {name[:120]!r} must have 1 to {MAX_RANK} axes; it says {rank}")
    dims = tuple(reader.number("<Q", name) for _ in range(rank))
    return name, dims, reader.number("<I", name), reader.number("<Q", name)


def _place(
    file_name: str, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int, data_start: int, size: int
) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for name, dims, kind, offset in infos:
        where = f"{file_name}: tensor {name[:120]!r}"
        if name in tensors:
            raise SourceInvalid(f"{where} is listed twice")
        if kind not in GGMLQuantizationType.__members__.values():
            raise UnsupportedModel(f"{where} is packed as type {kind}, which is not known")
        packing = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[packing]
        if min(dims) < 1 or dims[0] % block:
            raise SourceInvalid(
                f"{where} has axes {list(dims)}; {packing.name} needs positive ones and rows of a multiple of {block}"
            )
        begin = data_start + offset
        end = begin + math.prod(dims) // block * block_bytes
        if offset % alignment or end > size:
            raise SourceInvalid(
                f"{where} {list(dims)} {packing.name} lies at bytes {begin}..{end}; the file has {size} and aligns to {alignment}: "
                "truncated or corrupt"
            )
        tensors[name] = GgufTensor(dims[::-1], packing, begin, end)
    end_before, name_before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin < end_before:
            raise SourceInvalid(f"{file_name}: tensors {name_before[:120]!r} and {name[:120]!r} overlap")
        end_before, name_before = tensor.end, name
    return tensors
