"""The header of a GGUF file is followed only as far as the file reaches."""

import struct

import gguf
import pytest

from compiler_service.ingest.gguf_header import ArrayLength, read_gguf_header
from shared.errors import SourceInvalid, UnsupportedModel
from tests.support.sources import write_gguf

U32, STRING, ARRAY, F32, Q4_0 = 4, 8, 9, 0, 2


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str, dims: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def header(pairs=(), infos=(), *, magic=b"GGUF", version=3, tensor_count=None, metadata_count=None) -> bytes:
    counts = struct.pack(
        "<QQ", len(infos) if tensor_count is None else tensor_count, len(pairs) if metadata_count is None else metadata_count
    )
    return magic + struct.pack("<I", version) + counts + b"".join(pairs) + b"".join(infos)


def padded(raw: bytes, data: int, alignment: int = 32) -> bytes:
    return raw + bytes(-len(raw) % alignment) + bytes(data)


@pytest.fixture
def read(tmp_path):
    def read(raw: bytes):
        path = tmp_path / "m.gguf"
        path.write_bytes(raw)
        return read_gguf_header(path)

    return read


def test_it_agrees_with_the_format_library(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", packing=gguf.GGMLQuantizationType.Q8_0)
    mine, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    for tensor in theirs.tensors:
        got = mine.tensors[tensor.name]
        assert got.shape == tuple(reversed(tensor.shape.tolist()))
        assert (got.kind, got.begin, got.end - got.begin) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
    assert len(mine.tensors) == len(theirs.tensors)
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        if field.types[0] is gguf.GGUFValueType.ARRAY:
            assert mine.metadata[key] == ArrayLength(len(field.data))
        else:
            assert mine.metadata[key] == field.contents()


def test_every_scalar_type(read):
    kinds = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
    got = read(header([pair(f"k{kind}", kind, struct.pack(form, 1)) for kind, form in kinds.items()]))
    assert got.metadata == {f"k{kind}": 1 for kind in kinds}


def test_alignment_moves_the_data(read):
    raw = header([pair("general.alignment", U32, struct.pack("<I", 256))], [info("a", (8,))])
    got = read(padded(raw, 32, 256))
    assert got.tensors["a"].begin % 256 == 0


@pytest.mark.parametrize("keep", [0, 3, 23])
def test_less_than_a_header(read, keep):
    with pytest.raises(SourceInvalid, match="24"):
        read(header()[:keep])


def test_every_truncation_of_a_real_file_is_found(tmp_path):
    """BR-143: cut by one byte, by half, and anywhere in the header."""
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama")
    whole = path.read_bytes()
    data_start = min(tensor.begin for tensor in read_gguf_header(path).tensors.values())
    for keep in (len(whole) - 1, len(whole) // 2, data_start, *range(24, data_start, 97)):
        path.write_bytes(whole[:keep])
        with pytest.raises(SourceInvalid):
            read_gguf_header(path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (header(magic=b"GGML"), "begin with GGUF"),
        (header(version=1), "version 2 or 3"),
        (header(version=3 << 24), "version 2 or 3"),  # big-endian
        (header(tensor_count=1 << 60), "tensor count says"),
        (header(tensor_count=1), "tensor count says 1"),
        (header(metadata_count=(1 << 64) - 1), "metadata count says"),
        (header([struct.pack("<Q", 1 << 40) + b"abc" + bytes(16)]), "needs 1099511627776 bytes"),
        (header([pair("a", STRING, struct.pack("<Q", (1 << 64) - 8))]), "a needs"),
        (header([pair("a", ARRAY, struct.pack("<IQ", U32, 1 << 62))]), "a says"),
        (header([pair("a", ARRAY, struct.pack("<IQ", STRING, 1 << 31))]), "a says"),
        (header([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(16))]), "an array of the type 9"),
        (header([pair("a", 99, bytes(8))]), "unknown metadata type 99"),
        (header([pair("a", U32, bytes(4))] * 2), "twice"),
        (header([text(b"\xff\xfe") + struct.pack("<I", U32) + bytes(4)]), "not UTF-8"),
        (header([pair("general.alignment", U32, struct.pack("<I", 0))]), "power of two"),
        (header([pair("general.alignment", U32, struct.pack("<I", 48))]), "power of two"),
        (header([pair("general.alignment", STRING, text("32"))]), "power of two"),
        (header([], [info("a", ())]), "1 to 4 axes; it says 0"),
        (header([], [info("a", (1, 1, 1, 1, 1))]), "1 to 4 axes; it says 5"),
        (padded(header([], [info("a", (8,)), info("a", (8,), offset=32)]), 64), "listed twice"),
        (padded(header([], [info("a", (0, 8))]), 64), "positive ones"),
        (padded(header([], [info("a", (33,), Q4_0)]), 64), "multiple of 32"),
        (padded(header([], [info("a", (8,), offset=8)]), 64), "aligns to 32"),
        (padded(header([], [info("a", (9,))]), 32), "the file has"),
        (padded(header([], [info("a", (8,), offset=1 << 50)]), 64), "the file has"),
        (padded(header([], [info("a", (1 << 32, 1 << 31))]), 64), "the file has"),
        (padded(header([], [info("a", (16,)), info("b", (8,), offset=32)]), 64), "'a' and 'b' overlap"),
    ],
)
def test_what_a_header_may_not_say(read, raw, message):
    with pytest.raises(SourceInvalid, match=message):
        read(raw)


def test_an_unknown_packing_is_unsupported(read):
    with pytest.raises(UnsupportedModel, match="type 7777"):
        read(padded(header([], [info("a", (8,), 7777)]), 64))
