"""Model files that lie, bomb or wait: read as the build process reads them, each refused in time and within bounds.

What single headers may not say is in tests/unit/compiler_service/ingest; these are the ones that hurt whoever believes them.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import struct
import zipfile
from pathlib import Path

import pytest

from compiler_service.ingest.convert import open_source
from compiler_service.ingest.source import locate
from shared.errors import InvalidInput

CPU_S = 1.0
MOST_MEMORY_BYTES = 64 << 20
GIB = 1 << 30


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def gguf(tensors: int, pairs: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + rest


def gguf_pair(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def safetensors(header: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensor(shape: list[int], end: int, dtype: str = "F32") -> bytes:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}).encode()


def sparse(directory: Path, name: str, head: bytes, size: int) -> None:
    """A file that claims `size` bytes and holds few."""
    with (directory / name).open("wb") as file:
        file.write(head)
        file.truncate(size)


def spoilt(compression: int) -> bytes:
    """A wheel whose one member does not unpack."""
    whole = bytearray(zipped({"m.gguf": os.urandom(4096)}, compression))
    whole[60:4000] = bytes(3940)
    return bytes(whole)


STRINGS, ARRAY, U8 = 8, 9, 0
FILES: dict[str, bytes] = {
    "empty.gguf": b"",
    "magic.gguf": b"GGUF",
    "tensors.gguf": gguf(2**64 - 1, 0),
    "pairs.gguf": gguf(0, 2**63),
    "name.gguf": gguf(0, 1, struct.pack("<Q", 2**63 - 1)),
    "string.gguf": gguf(0, 1, gguf_pair(b"a", STRINGS, struct.pack("<Q", 64 * GIB))),
    "array.gguf": gguf(0, 1, gguf_pair(b"a", ARRAY, struct.pack("<IQ", U8, 2**62))),
    "strings.gguf": gguf(0, 1, gguf_pair(b"tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRINGS, 10**9))),
    "arrays.gguf": gguf(0, 1, gguf_pair(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 1000)),
    "empty.whl": b"",
    "none.whl": zipped({}),
    "bomb.whl": zipped({"m.gguf": bytes(256 << 20)}, zipfile.ZIP_DEFLATED),
    "climbing.whl": zipped({"../../../tmp/evil.gguf": b"GGUF"}),
    "cut.whl": zipped({"m.gguf": b"GGUF" * 1000})[:-30],
    "deflated.whl": spoilt(zipfile.ZIP_DEFLATED),
    "bzip2.whl": spoilt(zipfile.ZIP_BZIP2),
    "lzma.whl": spoilt(zipfile.ZIP_LZMA),
    "nested.whl": zipped({"m.gguf": zipped({"m.gguf": b"GGUF"})}),
    "empty.pt2": b"",
    "none.pt2": zipped({"p/version": b"1"}),
    "bomb.pt2": zipped({"p/models/model.json": b"[" * (128 << 20)}, zipfile.ZIP_DEFLATED),
    "deep.pt2": zipped({"p/models/model.json": b"[" * (1 << 20)}),
    "pickle.pt2": zipped({"p/models/model.json": b"{}", "p/data/weights/model.pt": b"\x80\x04K\x01."}),
    "plain.pt2": b"\x80\x02}q\x00.",
}
WEIGHTS: dict[str, bytes] = {
    "nothing": b"",
    "a length of 2^64": safetensors(b"{}", 2**64 - 1),
    "a length of 100 MB": safetensors(b"{}", 100_000_000),
    "a deep header": safetensors(b'{"a":' * 100_000),
    "a number of a million digits": safetensors(b'{"a": ' + b"9" * 1_000_000 + b"}"),
    "a tensor of 2^90 elements": safetensors(tensor([2**30] * 3, 8), data=bytes(8)),
    "a tensor of minus one": safetensors(tensor([-1], 4), data=bytes(4)),
    "an end of 2^63": safetensors(tensor([2], 2**63), data=bytes(8)),
    "a float for a size": safetensors(tensor([2], 8).replace(b"[2]", b"[2e300]"), data=bytes(8)),
    "a pickle": b"\x80\x04K\x01.",
    "a zip": zipped({"archive/data.pkl": b"\x80\x04K\x01."}),
}


@pytest.fixture
def bounded():
    """A second of this process's time and 64 MiB beyond what it holds; the kernel and a signal see to it."""

    def late(*_: object) -> None:
        raise TimeoutError(f"took more than {CPU_S} s of processor time")

    previous = signal.signal(signal.SIGPROF, late)
    (held,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(held.split()[1]) * 1024 + MOST_MEMORY_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    resource.setrlimit(resource.RLIMIT_DATA, limits)
    signal.signal(signal.SIGPROF, previous)


def refused(path: Path) -> None:
    with pytest.raises(InvalidInput), open_source(locate(str(path), (path.parent,))):
        pass


@pytest.mark.parametrize("name", FILES)
def test_a_file(tmp_path, bounded, name):
    (tmp_path / name).write_bytes(FILES[name])
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(tmp_path / name)
    assert not Path("/tmp/evil.gguf").exists()


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_weights_of_a_checkpoint(tmp_path, bounded, name):
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(WEIGHTS[name])
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    refused(model)


@pytest.mark.parametrize("size", [1 << 40, 1 << 43])
@pytest.mark.parametrize(
    ("name", "head"),
    [("m.gguf", gguf(1000, 1000)), ("m.whl", b"PK\x03\x04"), ("m.pt2", b"PK\x03\x04")],
    ids=["gguf", "wheel", "program"],
)
def test_a_file_that_claims_terabytes(tmp_path, bounded, name, head, size):
    sparse(tmp_path, name, head, size)
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(tmp_path / name)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(tmp_path, name):
    model = tmp_path / "model"
    model.mkdir()
    for file in {"config.json", "tokenizer.json", "model.safetensors"} - {name}:
        (model / file).write_text("{}")
    os.mkfifo(model / name)
    refused(model)


@pytest.mark.parametrize(
    "shard", ["x\0.safetensors", f"{'x' * 300}.safetensors", "\ud800.safetensors"], ids=["nul", "long", "surrogate"]
)
def test_an_index_of_names_that_no_file_has(tmp_path, shard):
    model = tmp_path / "model"
    model.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (model / file).write_text("{}")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    refused(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_link_that_leads_back_to_itself(tmp_path, name):
    model = tmp_path / "model"
    model.mkdir()
    for file in {"config.json", "tokenizer.json", "model.safetensors"} - {name}:
        (model / file).write_text("{}")
    (model / name).symlink_to(name)
    refused(model)
