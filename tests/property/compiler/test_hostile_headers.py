"""However a header is damaged, reading it ends in tensors inside the file or in a refusal: no other exception, no crash."""

import json
import tempfile
from functools import cache
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from compiler_service.ingest.gguf_header import read_gguf_header
from compiler_service.ingest.safetensors_header import read_safetensors_header
from shared.errors import InvalidInput
from tests.support.sources import write_gguf

EDITS = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=6)


@cache
def gguf_bytes() -> tuple[bytes, int]:
    """A whole file and the length of its header."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "m.gguf"
        write_gguf(path, "qwen3")
        return path.read_bytes(), min(tensor.begin for tensor in read_gguf_header(path).tensors.values())


@cache
def safetensors_bytes() -> tuple[bytes, int]:
    raw = save({f"layer.{i}": torch.zeros(3, i + 1) for i in range(8)})
    return raw, 8 + int.from_bytes(raw[:8], "little")


def damaged(whole: bytes, header: int, edits: list[tuple[int, int]], cut: int) -> bytes:
    raw = bytearray(whole)
    for place, value in edits:
        raw[place % header] = value
    return bytes(raw[: len(raw) - cut % len(raw)])


def read_all(read, raw: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(raw)
        file.flush()
        try:
            found = read(Path(file.name))
        except InvalidInput:
            return
    tensors = found if isinstance(found, dict) else found.tensors
    assert all(0 <= tensor.begin <= tensor.end <= len(raw) for tensor in tensors.values())


@settings(max_examples=300, deadline=None)
@given(EDITS, st.one_of(st.just(0), st.integers(0, 1 << 20)))
def test_gguf(edits, cut):
    read_all(read_gguf_header, damaged(*gguf_bytes(), edits, cut))


@settings(max_examples=300, deadline=None)
@given(EDITS, st.one_of(st.just(0), st.integers(0, 1 << 20)))
def test_safetensors(edits, cut):
    read_all(read_safetensors_header, damaged(*safetensors_bytes(), edits, cut))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries({"dtype": JSON | st.just("F32"), "shape": JSON, "data_offsets": JSON})


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=8), JSON | ENTRY, max_size=4))
def test_safetensors_headers_of_any_json(header):
    text = json.dumps(header).encode()
    read_all(read_safetensors_header, len(text).to_bytes(8, "little") + text + bytes(16))
