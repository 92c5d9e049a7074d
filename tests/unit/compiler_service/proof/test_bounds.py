"""The end of the cache: what a program or a profile already breaks is refused before anything is built."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from compiler_service.proof.certificate import prove_program
from compiler_service.proof.program import CacheDecl
from shared.profiles import parse_profile

MAX_LEN = 8


class _Step(nn.Module):
    def __init__(self, start: int | None = None) -> None:
        super().__init__()
        self.start = start

    def forward(self, input_ids: Tensor, p: Tensor, cache: Tensor) -> Tensor:
        rows = input_ids[:, None, :, None].expand(-1, 3, -1, 4).float()
        index = torch.arange(input_ids.shape[1]) + (p if self.start is None else self.start)
        return cache.index_copy_(2, index, rows).sum()


def _export(query_max: int, *, open_length: bool = False, start: int | None = None) -> ExportedProgram:
    inputs = (torch.zeros(1, 4, dtype=torch.int64), torch.tensor(0), torch.zeros(1, 3, MAX_LEN, 4))
    length = {2: Dim("max_len", min=2, max=1 << 20)} if open_length else None
    return export(_Step(start), inputs, dynamic_shapes=({1: Dim("n", min=1, max=query_max)}, None, length))


def _reason(program: ExportedProgram, *profiles: str, max_len: int | None = None) -> str:
    declared = {"k_cache.0": CacheDecl("cache", layer=0, max_len=max_len)}
    report = prove_program(program, program.run_decompositions(), declared, tuple(map(parse_profile, profiles)))
    return report["k_cache.0"].reason


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return _export(64)


def test_a_profile_longer_than_the_cache_is_refused(program: ExportedProgram) -> None:
    """The engine would build silently and drop the tokens past the end."""
    assert "profile prefill=1x16: the run reaches cell 16; k_cache.0 has cells 0..8" in _reason(
        program, "decode=1x1", "prefill=1x16"
    )


def test_a_profile_as_long_as_the_cache_is_accepted(program: ExportedProgram) -> None:
    assert _reason(program, "decode=1x1", "prefill=1x8") == ""


def test_without_profiles_the_programs_own_range_decides(program: ExportedProgram) -> None:
    assert "the run reaches cell 64" in _reason(program)


def test_a_start_written_into_the_program_counts() -> None:
    program = _export(64, start=3)
    assert _reason(program, "decode=1x1", "prefill=1x5") == ""
    assert "the run reaches cell 9" in _reason(program, "decode=1x1", "prefill=1x6")


def test_an_open_length_needs_a_declared_one() -> None:
    program = _export(64, open_length=True)
    assert "has no fixed size" in _reason(program, "prefill=1x8")
    assert _reason(program, "prefill=1x8", max_len=8) == ""
    assert "k_cache.0 has cells 0..7" in _reason(program, "prefill=1x8", max_len=7)
