"""The writer's files are the library's files, written one tensor at a time."""

import pytest
import torch
from safetensors import safe_open

from compiler_service.ingest.safetensors_header import read_safetensors_header
from compiler_service.ingest.safetensors_writer import ALIGNMENT, write_safetensors

VALUES = {"z": torch.randn(3, 5), "a": torch.randn(7), "m.scalar": torch.tensor(2.5), "strided": torch.randn(4, 6).t()}
SHAPES = {name: tuple(value.shape) for name, value in VALUES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_library_reads_back_what_was_written(tmp_path, dtype):
    path = tmp_path / "w.safetensors"
    write_safetensors(path, SHAPES, dtype, iter(VALUES.items()))
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(VALUES)
        for name, value in VALUES.items():
            stored = file.get_tensor(name)
            assert stored.dtype is dtype
            assert torch.equal(stored, value.to(dtype))


def test_data_starts_aligned_and_keeps_the_given_order(tmp_path):
    path = tmp_path / "w.safetensors"
    write_safetensors(path, SHAPES, torch.float32, iter(VALUES.items()))
    entries = read_safetensors_header(path)
    assert list(entries) == list(VALUES)
    assert next(iter(entries.values())).begin % ALIGNMENT == 0


def test_tensors_are_taken_one_at_a_time(tmp_path):
    """Each is on disk before the next is asked for, but for what the file object buffers."""
    path, sizes = tmp_path / "w.safetensors", []
    shapes = dict.fromkeys("abc", (1 << 16,))

    def drawn():
        for name, shape in shapes.items():
            sizes.append(path.stat().st_size)
            yield name, torch.zeros(shape)

    write_safetensors(path, shapes, torch.float32, drawn())
    assert sizes[1] >= 1 << 18
    assert sizes[2] >= 2 << 18


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": VALUES["a"]}, r"a \(7,\) came where .*'z'"),
        ({"z": VALUES["z"].t()}, r"z \(5, 3\) came where"),
        ({"z": VALUES["z"]}, "tensor a was announced and did not come"),
        (VALUES | {"more": VALUES["a"]}, r"more \(7,\) came where None was announced"),
    ],
)
def test_what_comes_must_be_what_was_announced(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        write_safetensors(tmp_path / "w", SHAPES, torch.float32, iter(given.items()))


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "w").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_safetensors(tmp_path / "w", SHAPES, torch.float32, iter(VALUES.items()))
    assert (tmp_path / "w").read_bytes() == b"mine"
