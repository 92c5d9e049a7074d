"""The header of a safetensors file is believed only where it describes exactly the file it stands in."""

import json
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from compiler_service.ingest.safetensors_header import read_safetensors_header
from shared.errors import SourceInvalid, UnsafeSource

TENSORS = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(7)}


def raw_file(path, header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_file_of_the_library_is_read_as_the_library_wrote_it(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    entries = read_safetensors_header(path)
    assert {name: (e.dtype, e.shape) for name, e in entries.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (5,)),
        "c": ("I64", ()),
    }
    data = path.read_bytes()
    for name, e in entries.items():
        assert data[e.begin : e.end] == TENSORS[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert max(e.end for e in entries.values()) == len(data)


def test_entries_come_in_file_order(tmp_path):
    path = raw_file(tmp_path / "m", {"x": entry(offsets=(8, 16)), "y": entry(offsets=(0, 8))}, bytes(16))
    assert list(read_safetensors_header(path)) == ["y", "x"]


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1, -40])
def test_every_truncation_is_found(tmp_path, keep):
    """BR-143."""
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SourceInvalid):
        read_safetensors_header(path)


def test_a_trailing_payload_is_found(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(SourceInvalid, match=f"must be {size} bytes long by its header; it is {size + 1}"):
        read_safetensors_header(path)


@pytest.mark.parametrize("length", [0, 1, 1 << 40, (1 << 64) - 1])
def test_a_lying_header_length_is_not_followed(tmp_path, length):
    with pytest.raises(SourceInvalid, match=f"declares a header of {length} bytes"):
        read_safetensors_header(raw_file(tmp_path / "m", {"a": entry()}, bytes(8), length=length))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{nonsense", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "twice"),
        ({"a": 3}, "must have dtype, shape and data_offsets alone"),
        ({"a": entry() | {"extra": 1}}, "must have dtype, shape and data_offsets alone"),
        ({"a": entry(dtype="F7")}, "dtype 'F7'"),
        ({"a": entry(dtype=["F32"])}, "dtype"),
        ({"a": entry(shape=(-2,))}, "integers >= 0"),
        ({"a": entry(shape=(2.0,))}, "integers >= 0"),
        ({"a": entry(shape=(True, 2))}, "integers >= 0"),
        ({"a": entry(shape=(1,) * 9)}, "integers >= 0"),
        ({"a": entry(offsets=(0, 8, 16))}, "two offsets"),
        ({"a": entry(offsets=(8, 0))}, "hold -8"),
        ({"a": entry(offsets=(0, 4))}, "F32 .2. = 8 bytes, but its offsets 0..4 hold 4"),
        ({"a": entry(shape=(1 << 31, 1 << 31, 1 << 31))}, "but its offsets 0..8 hold 8"),
        ({"a": entry(), "b": entry()}, "begins at byte .*; the one before ends at"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, "begins at byte .*; the one before ends at"),
        ({"a": entry(offsets=(8, 16))}, "begins at byte"),
    ],
)
def test_what_a_header_may_not_say(tmp_path, header, message):
    with pytest.raises(SourceInvalid, match=message):
        read_safetensors_header(raw_file(tmp_path / "m", header, bytes(8)))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_under_a_safetensors_name_is_unsafe(tmp_path, protocol):
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps({"weight": [1.0] * 100}, protocol))
    with pytest.raises(UnsafeSource):
        read_safetensors_header(path)


def test_a_torch_archive_under_a_safetensors_name_is_unsafe(tmp_path):
    path = tmp_path / "model.safetensors"
    torch.save(TENSORS, path)
    assert zipfile.is_zipfile(path)
    with pytest.raises(UnsafeSource):
        read_safetensors_header(path)
