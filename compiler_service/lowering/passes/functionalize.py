"""Rewrite in-place ops as functional ones, so that what a step changes is a list in the program's signature.

`index_put_` on a cache becomes `index_put` whose result is a mutation output. The proof and the paging pass read that form;
composite ops (linear, silu) stay whole, since the backend knows better how to take them apart.
"""

from __future__ import annotations

from dataclasses import replace

from compiler_service.export.program import DecoderProgram


def functionalize(program: DecoderProgram) -> DecoderProgram:
    """The same step without a mutating op in its graph."""
    return replace(program, program=program.program.run_decompositions({}))
