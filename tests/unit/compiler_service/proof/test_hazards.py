"""What a write in place would change besides its cells. Every write here is a proper run; the verdict is about the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from compiler_service.proof.certificate import ProofReport, prove_program
from compiler_service.proof.program import CacheDecl
from tests.unit.compiler_service.proof.programs import PROVED, REFUTED, Inputs, Write, kinds, make_cache, prove_zoo


def run(cache: Tensor, i: Inputs) -> None:
    cache.index_copy_(2, i.count + i.p, i.x)


def _clone_before(cache: Tensor, i: Inputs) -> Tensor:
    old = cache.clone()
    run(cache, i)
    return cache * 2 + old


def _sum_before(cache: Tensor, i: Inputs) -> Tensor:
    total = cache[:, 0].sum()
    run(cache, i)
    return total


def _bits_before(cache: Tensor, i: Inputs) -> Tensor:
    """BR-013: a read through a view of another type."""
    bits = cache.view(torch.int32)[:, :, :6] + 7
    run(cache, i)
    return bits


def _old_behind_moved_axes(cache: Tensor, i: Inputs) -> Tensor:
    moved = cache.transpose(1, 2)
    total = moved.sum()
    moved.index_copy_(1, i.count + i.p, i.x.transpose(1, 2))
    return total


def _aside(cache: Tensor, i: Inputs) -> Tensor:
    other = cache.index_copy(2, i.count, i.x)
    run(cache, i)
    return other


def _from_itself(cache: Tensor, i: Inputs) -> None:
    cache.index_copy_(2, torch.arange(4) + i.p, cache[:, :, :4])


def _twice(cache: Tensor, i: Inputs) -> None:
    run(cache, i)
    cache.index_copy_(2, i.count, i.x)


def _through_clone(cache: Tensor, i: Inputs) -> None:
    work = cache.clone()
    run(work, i)
    cache.copy_(work)


def _through_contiguous(cache: Tensor, i: Inputs) -> None:
    work = cache.transpose(1, 2).contiguous()
    work.index_copy_(1, i.count + i.p, i.x.transpose(1, 2))
    cache.copy_(work.transpose(1, 2))


def _through_half(cache: Tensor, i: Inputs) -> None:
    cache.copy_(cache.half().index_copy(2, i.count + i.p, i.x.half()).float())


def _through_flat_view(cache: Tensor, i: Inputs) -> None:
    cache.flatten(0, 1).index_copy_(1, i.count + i.p, i.x.flatten(0, 1))


def _view_before_read_after(cache: Tensor, i: Inputs) -> Tensor:
    """A view sees the new content whenever it was taken."""
    view = cache[:, :, :4]
    run(cache, i)
    return view.sum()


def _shape_only(cache: Tensor, i: Inputs) -> Tensor:
    empty = torch.zeros_like(cache).sum() + cache.new_ones(cache.shape[2]).sum()
    run(cache, i)
    return empty


def _returned(cache: Tensor, i: Inputs) -> Tensor:
    """BR-007: the step returns the cache it has just written."""
    run(cache, i)
    return cache


HARMLESS: dict[str, Write] = {
    "plain": run,
    "view_read_after": _view_before_read_after,
    "shape_only": _shape_only,
    "returned": _returned,
}
HARMFUL: dict[str, tuple[Write, str]] = {
    # name: (write, what the reason must say)
    "clone_before": (_clone_before, "clone reads clone_before as it was before the write"),
    "sum_before": (_sum_before, "sum_"),
    "bits_before": (_bits_before, "bits_before as it was before the write"),
    "old_behind_moved_axes": (_old_behind_moved_axes, "as it was before the write"),
    "aside": (_aside, "index_copy"),
    "from_itself": (_from_itself, "as it was before the write"),
    "twice": (_twice, "twice is written twice, by index_copy"),
    "through_clone": (_through_clone, "reaches through_clone through clone"),
    "through_contiguous": (_through_contiguous, "reaches through_contiguous through"),
    "through_half": (_through_half, "through_half"),
    "through_flat_view": (_through_flat_view, "through_flat_view"),
}


@pytest.fixture(scope="module")
def report() -> ProofReport:
    return prove_zoo(HARMLESS | {name: write for name, (write, _) in HARMFUL.items()})


@pytest.mark.parametrize("name", HARMLESS)
def test_other_uses_of_a_cache_do_no_harm(report: ProofReport, name: str) -> None:
    assert kinds(report[name]) == PROVED, report[name].reason
    assert report[name].ok


@pytest.mark.parametrize("name", HARMFUL)
def test_what_in_place_writing_would_change_is_refused_by_name(report: ProofReport, name: str) -> None:
    proof = report[name]
    assert not proof.ok
    assert HARMFUL[name][1] in proof.reason
    # Reshaped memory is only not understood; through_half overwrites the whole cache with a cast of itself.
    if name not in ("through_flat_view", "through_half"):
        assert kinds(proof) == REFUTED, proof.reason


class _Unread(nn.Module):
    """Attends over the rows at hand, never over the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", make_cache())

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        self.k.index_copy_(2, torch.arange(x.shape[2]) + p, x)
        return x.sum()


def test_a_cache_nobody_reads_afterwards_is_refused() -> None:
    program = export(_Unread(), (torch.zeros(make_cache()[:, :, :4].shape), torch.tensor(0)))
    report = prove_program(program, program.run_decompositions(), {"k_cache.0": CacheDecl("k", layer=0)})
    assert kinds(report["k_cache.0"]) == REFUTED
    assert "nothing reads k_cache.0 after the write" in report["k_cache.0"].reason


class _OneStorage(nn.Module):
    """BR-014: layer 1 reads, through another view, the memory that layer 0 writes."""

    def __init__(self) -> None:
        super().__init__()
        base = make_cache()
        self.register_buffer("a", base)
        self.register_buffer("b", base[:, :2])

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        self.a.index_copy_(2, torch.arange(4) + p, x)
        return self.a.sum() + self.b.sum()


def test_two_caches_in_one_memory_are_refused_with_both_names() -> None:
    program = export(_OneStorage(), (torch.zeros(make_cache()[:, :, :4].shape), torch.tensor(0)))
    declared = {"k_cache.0": CacheDecl("a", layer=0), "k_cache.1": CacheDecl("b", layer=1)}
    report = prove_program(program, program, declared)  # torch cannot lower such a program
    assert not report.ok
    assert "k_cache.0 and k_cache.1 are the same memory" in report["k_cache.0"].reason
    assert "k_cache.1 and k_cache.0 are the same memory" in report["k_cache.1"].reason


def test_two_names_for_one_cache_are_a_mistake_of_the_caller() -> None:
    program = export(_Unread(), (torch.zeros(make_cache()[:, :, :4].shape), torch.tensor(0)))
    with pytest.raises(ValueError, match="a target of its own"):
        prove_program(program, program, {"k_cache.0": CacheDecl("k", layer=0), "v_cache.0": CacheDecl("k", layer=0)})
    with pytest.raises(KeyError, match="no buffer and no input named 'keys'"):
        prove_program(program, program, {"k_cache.0": CacheDecl("keys", layer=0)})
