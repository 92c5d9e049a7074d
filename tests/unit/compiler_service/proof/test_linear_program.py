"""The form our own export writes: rows x (start + arange) by index_put, read by quire::attend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from compiler_service.proof.certificate import prove_program
from compiler_service.proof.program import CacheDecl
from shared.bindings import cache_name
from shared.errors import WriteNotProven
from shared.kernels.attention.ops import load_ops
from shared.profiles import parse_profile

LAYERS, HEADS, HEAD_DIM, MAX_LEN = 2, 3, 4, 16


class Decoder(nn.Module):
    """Layers of cached attention over lifted caches; `mask_start` derives the start the attention masks by."""

    def __init__(self, mask_start=lambda start: start) -> None:
        super().__init__()
        self.mask_start = mask_start

    def forward(self, x: Tensor, write_start: Tensor, k_cache: list[Tensor], v_cache: list[Tensor]) -> Tensor:
        batch, _, query_len, _ = x.shape
        rows = torch.arange(batch)[:, None]
        slots = write_start.to(torch.int64)[:, None] + torch.arange(query_len)
        for k, v in zip(k_cache, v_cache, strict=True):
            k[rows, :, slots] = x.transpose(1, 2)
            v[rows, :, slots] = (2 * x).transpose(1, 2)
            x = torch.ops.quire.attend(x, k, v, self.mask_start(write_start), 1.0, None, None, None)
        return x


def export_decoder(decoder: Decoder) -> ExportedProgram:
    load_ops()
    batch, query_len = Dim("batch", min=1, max=8), Dim("query_len", min=1, max=12)
    caches = [torch.zeros(3, HEADS, MAX_LEN, HEAD_DIM) for _ in range(LAYERS)]
    inputs = (torch.randn(3, HEADS, 5, HEAD_DIM), torch.zeros(3, dtype=torch.int32), caches, [c.clone() for c in caches])
    dynamic = ({0: batch, 2: query_len}, {0: batch}, [{0: batch}] * LAYERS, [{0: batch}] * LAYERS)
    return export(decoder, inputs, dynamic_shapes=dynamic)


CACHES = {cache_name(i, kind): CacheDecl(f"{kind}_cache_{i}", layer=i) for i in range(LAYERS) for kind in "kv"}


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return export_decoder(Decoder())


def test_every_cache_is_proven_before_and_after_decomposition(program: ExportedProgram) -> None:
    report = prove_program(program, program.run_decompositions(), CACHES, (parse_profile("prefill=4x12"),))
    report.require()
    assert report.ok
    assert [c.cache for c in report.certificates] == list(CACHES)
    for certificate in report.certificates:
        assert (certificate.verdict_before, certificate.verdict_after, certificate.reason) == ("proved", "proved", "")
        assert (certificate.form, certificate.axis, certificate.start) == ("index_put", 2, "write_start[row]")
    # index_put wants [batch, query_len, heads, head_dim]: the heads are the update's axis 2.
    assert {proof.after.update_axes for proof in report.caches} == {(0, 2, 1, 3)}
    assert len(report.proven_nodes) == 2 * LAYERS


def test_a_mask_that_starts_elsewhere_is_refused_by_layer() -> None:
    program = export_decoder(Decoder(mask_start=lambda start: start - 1))
    report = prove_program(program, program.run_decompositions(), CACHES)
    assert len(report.refusals) == 2 * LAYERS
    with pytest.raises(
        WriteNotProven, match=r"k_cache\.1.*written from write_start\[row\] on, attend_1 masks from .* - 1 on"
    ) as error:
        report.require()
    assert set(error.value.details) == set(CACHES)
    assert not report.proven_nodes
