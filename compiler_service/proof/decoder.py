"""The proof of a decoder program: where its caches are, by the names its export gives them."""

from __future__ import annotations

from compiler_service.export.program import DecoderProgram
from compiler_service.lowering.passes.functionalize import functionalize
from compiler_service.proof.certificate import ProofReport, prove_program
from compiler_service.proof.program import CacheDecl
from shared.bindings import cache_name


def prove_decoder(exported: DecoderProgram, lowered: DecoderProgram) -> ProofReport:
    """Prove every cache write of `lowered`, and that it is the write `exported` asked for.

    Both are linear programs; the caches of a layer are user inputs of the same names in either.
    """
    caches = {
        cache_name(layer, kind): CacheDecl(
            target=exported.placeholder(cache_name(layer, kind)), layer=layer, max_len=exported.cache.max_len
        )
        for layer in range(exported.cache.num_layers)
        for kind in ("k", "v")
    }
    # Ours takes one walk over the graph where torch's own functionalization traces the model twice more.
    return prove_program(functionalize(exported).program, lowered.program, caches, exported.profiles.profiles)
