"""Small programs that write caches, exported for real, and their proofs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from compiler_service.proof.certificate import CacheProof, ProofReport, prove_program
from compiler_service.proof.program import CacheDecl
from compiler_service.proof.verdict import Proved, Refuted, Unknown
from shared.profiles import OptimizationProfile

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 3, 16, 4
QUERY = Dim("query_len", min=1, max=LENGTH - 1)


class Step(nn.Module):
    """`function(cache, *inputs)` as a module, whose cache is its buffer `store.k`."""

    def __init__(self, function: Callable[..., Any], cache: Tensor) -> None:
        super().__init__()
        self.function = function
        self.store = nn.Module()
        self.store.register_buffer("k", cache)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.store.k, *inputs)


CACHE = "k_cache.0"
DECLARED = {CACHE: CacheDecl("store.k", layer=0)}


def cache(batch: int = BATCH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(batch, HEADS, LENGTH, HEAD_DIM, dtype=dtype)


def rows(length: int = 5, batch: int = BATCH) -> Tensor:
    """New rows `[batch, heads, length, head_dim]`."""
    return torch.randn(batch, HEADS, length, HEAD_DIM)


def exported(function: Callable[..., Any], kept: Tensor, inputs: Sequence[Tensor], dynamic: Sequence[Any]) -> ExportedProgram:
    return export(Step(function, kept), tuple(inputs), dynamic_shapes=(tuple(dynamic),))


def prove(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    dynamic: Sequence[Any] | None = None,
    *,
    kept: Tensor | None = None,
    profiles: Sequence[OptimizationProfile] = (),
    declared: Mapping[str, CacheDecl] = DECLARED,
) -> CacheProof:
    """The proof of `function(cache, *inputs)`. Input 0, the new rows, has a dynamic length unless `dynamic` says otherwise."""
    if dynamic is None:
        dynamic = [{2: QUERY}, *[None] * (len(inputs) - 1)]
    program = exported(function, cache() if kept is None else kept, inputs, dynamic)
    return prove_exported(program, declared, profiles)[CACHE]


def prove_exported(
    program: ExportedProgram, declared: Mapping[str, CacheDecl], profiles: Sequence[OptimizationProfile] = ()
) -> ProofReport:
    return prove_program(program, program.run_decompositions(), declared, profiles)


def kinds(proof: CacheProof) -> tuple[type, type]:
    """Kinds of verdict before and after lowering."""
    return type(proof.before.verdict), type(proof.after.verdict)


PROVED = (Proved, Proved)
REFUTED = (Refuted, Refuted)
UNKNOWN = (Unknown, Unknown)
