"""The proof of a decoder program: where its caches are, by the names its export gives them."""

from __future__ import annotations

from compiler_service.export.program import DecoderProgram
from compiler_service.lowering.passes.attend_by_start import ProvenLayer, RowsWritten
from compiler_service.lowering.passes.functionalize import functionalize
from compiler_service.proof.attended import read_attention
from compiler_service.proof.certificate import ProofReport, WriteProof, prove_program
from compiler_service.proof.program import CacheDecl
from shared.bindings import WRITE_START, cache_name


def prove_decoder(exported: DecoderProgram, lowered: DecoderProgram) -> ProofReport:
    """Prove every cache write of `lowered`, and that it is the write `exported` asked for.

    Both are linear programs; the caches of a layer are user inputs of the same names in either.
    """
    # Ours takes one walk over the graph where torch's own functionalization traces the model twice more.
    return prove_program(functionalize(exported).program, lowered.program, _caches(exported), exported.profiles.profiles)


def read_proven_layers(linear: DecoderProgram, report: ProofReport) -> list[ProvenLayer]:
    """How each layer of `linear`, whose every write `report` proves, writes and reads its caches.

    UnsupportedModel where another operator could not do the same; WriteNotProven for a start that is not the step's.
    """
    seen = read_attention(linear.program, _caches(linear))
    starts = linear.placeholder(WRITE_START)
    layers = []
    for layer, cells in sorted(seen.items()):
        k, v = (_rows_written(report[cache_name(layer, kind)].after, starts) for kind in "kv")
        layers.append(ProvenLayer(k, v, cells.node, cells.window))
    return layers


def _rows_written(proof: WriteProof, starts: str) -> RowsWritten:
    proof.require_start(starts)
    return RowsWritten(proof.node, proof.update, proof.update_axes)


def _caches(program: DecoderProgram) -> dict[str, CacheDecl]:
    return {
        cache_name(layer, kind): CacheDecl(
            target=program.placeholder(cache_name(layer, kind)), layer=layer, max_len=program.cache.max_len
        )
        for layer in range(program.cache.num_layers)
        for kind in ("k", "v")
    }
