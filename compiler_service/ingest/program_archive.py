"""A `.pt2` archive read by hand: its graph as JSON, its tensors as plain bytes. Nothing in it is unpickled, nothing is run.

A zip without compression, all of one top folder:

    models/NAME.json                          the graph
    data/weights/NAME_weights_config.json     parameter or buffer -> payload file, type, sizes, strides, offset
    data/constants/NAME_constants_config.json the same for constants and buffers that are not saved with a model
    data/{weights,constants}/*                payloads: raw elements; pickles and objects are refused
    data/sample_inputs/NAME.pt                a pickle, never looked at
"""

from __future__ import annotations

import json
import mmap
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from compiler_service.ingest.checkpoint_files import MAX_JSON_BYTES
from shared.errors import SourceInvalid, UnsafeSource

_DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
}
"""torch.export's numbers for element types."""
_STRIDED = 7
_LOCAL_HEADER_BYTES = 30
MAX_GRAPH_BYTES = 4 * MAX_JSON_BYTES


@dataclass(frozen=True, slots=True)
class Payload:
    """One tensor of the archive. `is_parameter` as the archive says."""

    tensor: Tensor
    is_parameter: bool


@dataclass(slots=True)
class ProgramArchive:
    """An open archive. Tensors are mapped from the file: their bytes are read when they are touched."""

    path: Path
    graph: dict[str, Any] = field(init=False)
    payloads: dict[str, Payload] = field(init=False)
    _entries: dict[str, zipfile.ZipInfo] = field(init=False)
    _map: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        """SourceInvalid for what is no whole archive of one program; UnsafeSource where reading it would need a pickle."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                self._entries = {_without_top(info.filename): info for info in archive.infolist()}
        except (zipfile.BadZipFile, OSError) as error:
            raise SourceInvalid(f"{self.path.name} is no .pt2 archive: {error}") from error
        with self.path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        models = [name for name in self._entries if PurePosixPath(name).parent.name == "models" and name.endswith(".json")]
        if len(models) != 1:
            raise SourceInvalid(f"{self.path.name} must hold one exported program; it holds {len(models)}")
        name = PurePosixPath(models[0]).stem
        self.graph = self._json(models[0], MAX_GRAPH_BYTES)
        self.payloads = {}
        for folder in ("weights", "constants"):
            if (old := f"data/{folder}/{name}.pt") in self._entries:
                raise UnsafeSource(f"{old} is a pickle, which runs code when it is read; save the program again with this torch")
            config = self._json(f"data/{folder}/{name}_{folder}_config.json", MAX_JSON_BYTES)
            for target, meta in _object(config, "config").items():
                self.payloads[target] = self._payload(folder, target, meta)

    def _json(self, name: str, most: int) -> dict[str, Any]:
        try:
            fields = json.loads(self._bytes(name, most))
        except (ValueError, RecursionError) as error:
            raise SourceInvalid(f"{name} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise SourceInvalid(f"{name} must be a JSON object; got {type(fields).__name__}")
        return fields

    def _bytes(self, name: str, most: int) -> bytes:
        begin, size = self._place(name)
        if size > most:
            raise SourceInvalid(f"{name} must be at most {most} bytes; it is {size}")
        return self._map[begin : begin + size]

    def _place(self, name: str) -> tuple[int, int]:
        """(offset, size) of the stored bytes of `name`; the local header repeats the name and pads to an aligned offset."""
        info = self._entries.get(name)
        if info is None:
            raise SourceInvalid(f"{self.path.name} has no {name}; save the program again with torch.export.save")
        if info.compress_type != zipfile.ZIP_STORED:
            raise SourceInvalid(f"{name} is compressed; a .pt2 archive stores its records as they are")
        header = self._map[info.header_offset : info.header_offset + _LOCAL_HEADER_BYTES]
        begin = info.header_offset + _LOCAL_HEADER_BYTES
        begin += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        if begin + info.file_size > len(self._map):
            raise SourceInvalid(f"{name} ends at byte {begin + info.file_size}, the file has {len(self._map)}; it is cut off")
        return begin, info.file_size

    def _payload(self, folder: str, target: str, meta: object) -> Payload:
        fields = meta if isinstance(meta, dict) else {}
        described = fields.get("tensor_meta")
        if fields.get("use_pickle") is not False or not isinstance(described, dict):
            raise UnsafeSource(
                f"{target[:120]} is a pickle, which runs code when it is read; a program's tensors must be plain ones"
            )
        begin, size = self._place(f"data/{folder}/{fields.get('path_name')}")
        dtype = _DTYPES.get(described.get("dtype", 0))
        if dtype is None or described.get("layout") != _STRIDED:
            raise SourceInvalid(f"{target[:120]} has element type {described.get('dtype')} in layout {described.get('layout')}")
        sizes, strides = (_numbers(target, described.get(axis)) for axis in ("sizes", "strides"))
        (offset,) = _numbers(target, [described.get("storage_offset")])
        needed = offset + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)) + 1 if 0 not in sizes else 0
        if needed * dtype.itemsize > size:
            raise SourceInvalid(f"{target[:120]} needs {needed * dtype.itemsize} bytes, its record has {size}")
        if not needed:
            return Payload(torch.empty(sizes, dtype=dtype), bool(fields.get("is_param")))
        stored = torch.frombuffer(self._map, dtype=dtype, count=size // dtype.itemsize, offset=begin)
        return Payload(stored.as_strided(sizes, strides, offset), bool(fields.get("is_param")))


def _without_top(name: str) -> str:
    return name.partition("/")[2]


def _object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise SourceInvalid(f"{name} must be a JSON object; got {type(value).__name__}")
    return value


def _numbers(target: str, values: object) -> list[int]:
    """Sizes, strides or an offset, which must be plain numbers from 0 on."""
    found = [value.get("as_int") if isinstance(value, dict) else None for value in values] if isinstance(values, list) else [None]
    numbers = [number for number in found if type(number) is int and number >= 0]
    if len(numbers) != len(found):
        raise SourceInvalid(f"{target[:120]} must have fixed sizes and strides; got {str(values)[:120]}")
    return numbers
