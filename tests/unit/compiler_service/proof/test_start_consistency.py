"""The second proof: what a query may see starts where the write starts, and rows are rotated by the right positions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn.functional import scaled_dot_product_attention as sdpa

from compiler_service.proof.certificate import ProofReport, prove_program
from compiler_service.proof.program import CacheDecl
from compiler_service.proof.verdict import Unknown
from shared.kernels.attention.ops import load_ops

BATCH, HEADS, LENGTH, HEAD_DIM, GROUP = 2, 2, 24, 4, 2

Attend = Callable[[Tensor, Tensor, Tensor, "Start"], Tensor]


class Start:
    """Where the new rows go, as scalars and as a start for each row."""

    def __init__(self, p: Tensor, p_rows: Tensor, other: Tensor, padding: Tensor, weight: Tensor, n: int) -> None:
        self.p, self.p_rows, self.other, self.padding, self.weight, self.n = p, p_rows, other, padding, weight, n

    @property
    def queries(self) -> Tensor:
        return torch.arange(self.n)[:, None]

    @property
    def cells(self) -> Tensor:
        return torch.arange(LENGTH)


def attend(start: Callable[[Start], Tensor]) -> Attend:
    return lambda q, k, v, s: torch.ops.quire.attend(q, k, v, start(s), 1.0, None, None, None)


def masked(mask: Callable[[Start], Tensor | None], **kwargs: bool) -> Attend:
    """SDPA over repeated heads, as transformers calls it."""

    def attention(q: Tensor, k: Tensor, v: Tensor, s: Start) -> Tensor:
        return sdpa(q, _repeated(k), _repeated(v), attn_mask=mask(s), **kwargs)

    return attention


def composed(weigh: Callable[[Tensor, Start], Tensor]) -> Attend:
    """Attention spelled out: `weigh` turns scores into what the softmax gets."""

    def attention(q: Tensor, k: Tensor, v: Tensor, s: Start) -> Tensor:
        scores = q @ _repeated(k).transpose(2, 3) / math.sqrt(HEAD_DIM)
        return torch.softmax(weigh(scores, s), -1) @ _repeated(v)

    return attention


def _repeated(rows: Tensor) -> Tensor:
    return rows[:, :, None].expand(-1, -1, GROUP, -1, -1).reshape(BATCH, HEADS * GROUP, LENGTH, HEAD_DIM)


def _put_together(rows: Tensor) -> Tensor:
    """As MLA puts keys together of two parts."""
    whole = rows.new_empty(rows.shape)
    whole[..., :2], whole[..., 2:] = rows[..., :2], rows[..., 2:]
    return whole


def causal(s: Start) -> Tensor:
    return s.cells <= s.queries + s.p


def windowed(s: Start) -> Tensor:
    return causal(s) & (s.cells > s.queries + s.p - 8)


def additive(s: Start) -> Tensor:
    return torch.where(causal(s), 0.0, torch.finfo(torch.float32).min)


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, s: Start) -> Tensor:
    """As gpt-oss attends: one more score a query, whose weight goes nowhere."""
    scores = q @ _repeated(k).transpose(2, 3) + additive(s)
    weights = torch.softmax(torch.cat([scores, torch.zeros(BATCH, HEADS * GROUP, s.n, 1)], -1), -1)
    return weights[..., :-1] @ _repeated(v)


FOLLOWS: dict[str, Attend] = {
    "attend": attend(lambda s: s.p.expand(BATCH).int()),
    "bool_mask": masked(causal),
    "mask_of_four_axes": masked(lambda s: causal(s)[None, None].expand(BATCH, 1, -1, -1)),
    "turned_around": masked(lambda s: s.queries + s.p >= s.cells),
    "strict_comparison": masked(lambda s: s.cells < s.queries + s.p + 1),
    "not_after": masked(lambda s: ~(s.cells > s.queries + s.p)),
    "window": masked(windowed),
    "chunks": masked(lambda s: causal(s) & (s.cells // 8 == (s.queries + s.p) // 8)),
    "chunks_turned_around": masked(lambda s: causal(s) & ((s.queries + s.p) // 8 == s.cells // 8)),
    "one_chunk_for_all": masked(lambda s: causal(s) & (s.cells // LENGTH == (s.queries + s.p) // LENGTH)),
    "also_below_the_end": masked(lambda s: causal(s) & (s.cells < s.p + s.n) & (s.cells >= 0)),
    "additive_mask": masked(additive),
    "filled_mask": masked(lambda s: torch.zeros(s.n, LENGTH).masked_fill(s.cells > s.queries + s.p, -math.inf)),
    "softmax": composed(lambda scores, s: scores + additive(s)),
    "softmax_where": composed(lambda scores, s: torch.where(causal(s), scores, -math.inf)),
    "softmax_filled": composed(lambda scores, s: scores.masked_fill(~causal(s), -math.inf)),
    "softcapped": composed(lambda scores, s: 5 * torch.tanh(scores / 5) + additive(s)),
    "parts": lambda q, k, v, s: torch.cat([masked(causal)(q, k, part.repeat(1, HEADS, 1, 1), s) for part in v.chunk(HEADS, 1)], 1),
    "put_together": lambda q, k, v, s: masked(causal)(q, _put_together(k), v, s),
    "projected": lambda q, k, v, s: masked(causal)(
        q, torch.nn.functional.linear(k, s.weight), torch.nn.functional.linear(v, s.weight), s
    ),
    "scaled_after_the_mask": composed(lambda scores, s: (scores + additive(s)) / 2),
    "filled_with_a_tensor": composed(lambda scores, s: torch.where(causal(s), scores, torch.full([], -1e9))),
    "less_its_maximum": composed(lambda scores, s: (m := scores + additive(s)) - m.amax(-1, keepdim=True)),
    "sinks": _with_sinks,
    "products_of_heads": lambda q, k, v, s: (
        torch.baddbmm(
            additive(s).expand(BATCH * HEADS * GROUP, -1, -1),
            q.reshape(BATCH * HEADS * GROUP, s.n, HEAD_DIM),
            _repeated(k).reshape(BATCH * HEADS * GROUP, LENGTH, HEAD_DIM).transpose(1, 2),
        )
        .add(additive(s))
        .softmax(-1)
        .bmm(_repeated(v).reshape(BATCH * HEADS * GROUP, LENGTH, HEAD_DIM))
    ),
    "einsum": lambda q, k, v, s: torch.einsum(
        "bhqk,bhkd->bqhd", torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, _repeated(k)) + additive(s), -1), _repeated(v)
    ),
    "biased": composed(lambda scores, s: scores + 0.5 * s.cells + additive(s)),
}


@torch.library.custom_op("quire_test::attention", mutates_args=())
def _own_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.zeros_like(q)


@_own_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


def _exponentials(q: Tensor, k: Tensor, v: Tensor, s: Start) -> Tensor:
    weights = torch.exp(q @ _repeated(k).transpose(2, 3))
    return weights / weights.sum(-1, keepdim=True) @ _repeated(v)


def _products_summed(q: Tensor, k: Tensor, v: Tensor, s: Start) -> Tensor:
    weights = torch.softmax((q[:, :, :, None] * _repeated(k)[:, :, None]).sum(-1) + _repeated(v).sum(-1)[:, :, None], -1)
    return weights.sum(-1)


def _two_softmaxes(q: Tensor, k: Tensor, v: Tensor, s: Start) -> Tensor:
    scores = q @ _repeated(k).transpose(2, 3)
    bare = torch.softmax(scores * 2, -1)
    return (bare + torch.softmax(scores + additive(s), -1)) @ _repeated(v)


STRAYS: dict[str, tuple[Attend, str, str]] = {
    # name: (attention, verdict, what the reason must say)
    "frozen_attend": (attend(lambda s: torch.zeros(BATCH, dtype=torch.int32)), "refuted", "masks from 0 on"),
    "other_attend": (attend(lambda s: s.p_rows), "refuted", "written from p on, attend"),
    "frozen_mask": (masked(lambda s: s.cells <= s.queries), "refuted", "masks from 0 on"),
    "frozen_window": (masked(lambda s: causal(s) & (s.cells > s.queries - 8)), "refuted", "the window of"),
    "frozen_chunks": (masked(lambda s: causal(s) & (s.cells // 8 == s.queries // 8)), "refuted", "masks from 0 on"),
    "shifted_chunks": (masked(lambda s: causal(s) & (s.cells // 8 == (s.queries + s.p + 1) // 8)), "refuted", "from p + 1 on"),
    "chunks_from_another_cell": (
        masked(lambda s: causal(s) & ((s.cells + 1) // LENGTH == (s.queries + s.p + 1) // LENGTH)),
        "unknown",
        "no comparison",
    ),
    "chunks_of_two_sizes": (masked(lambda s: causal(s) & (s.cells // 8 == (s.queries + s.p) // 9)), "unknown", "no comparison"),
    "other_chunks": (masked(lambda s: causal(s) & ~(s.cells // 8 == (s.queries + s.p) // 8)), "unknown", "no comparison"),
    "chunks_alone": (masked(lambda s: s.cells // 8 == (s.queries + s.p) // 8), "unknown", "see cells after their own"),
    "chunks_of_cells": (masked(lambda s: causal(s) & (s.cells // 8 == (s.cells + s.p) // 8)), "unknown", "compares chunks of"),
    "one_too_far": (masked(lambda s: s.cells <= s.queries + s.p + 1), "refuted", "masks from p + 1 on"),
    "one_too_few": (masked(lambda s: s.cells < s.queries + s.p), "refuted", "masks from p - 1 on"),
    "window_of_nothing": (masked(lambda s: causal(s) & (s.cells > s.queries + s.p)), "refuted", "hides a query's own cell"),
    "other_start": (masked(lambda s: s.cells <= s.queries + s.other), "refuted", "masks from other on"),
    "computed_start": (masked(lambda s: s.cells <= s.queries + s.p.clamp(0, 9)), "unknown", "which may be another cell"),
    "start_per_row": (
        masked(lambda s: s.cells <= s.queries + s.p_rows[:, None, None, None]),
        "refuted",
        "masks from p_rows[row] on",
    ),
    "no_mask": (masked(lambda s: None), "refuted", "has no mask: it sees all 24 cells"),
    "causal_flag": (masked(lambda s: None, is_causal=True), "refuted", "causal mask"),
    "not_causal": (masked(lambda s: (s.cells < s.p + s.n).expand(s.n, -1)), "unknown", "see cells after their own"),
    "backwards": (masked(lambda s: s.cells >= s.queries + s.p), "unknown", "see cells after their own"),
    "padding": (masked(lambda s: s.padding), "unknown", "no comparison of cells"),
    "causal_and_padding": (masked(lambda s: causal(s) & s.padding), "unknown", "no comparison of cells"),
    "causal_or_more": (masked(lambda s: causal(s) | (s.cells > 9)), "unknown", "no comparison of cells"),
    "fewer_queries": (
        lambda q, k, v, s: masked(causal)(q[:, :, :4], k, v, Start(s.p, s.p_rows, s.other, s.padding, s.weight, 4)),
        "refuted",
        "queries",
    ),
    "own_operator": (lambda q, k, v, s: _own_attention(q, k, v), "unknown", "how it masks is not known"),
    "frozen_softmax": (
        composed(lambda scores, s: scores + torch.where(s.cells <= s.queries, 0.0, -math.inf)),
        "refuted",
        "from 0 on",
    ),
    # What looks like the mask of "additive_mask" and hides nothing, or not enough.
    "mask_cast_to_numbers": (masked(lambda s: causal(s).float()), "unknown", "no comparison"),
    "numbers_cast_to_a_mask": (masked(lambda s: additive(s).bool()), "unknown", "no comparison"),
    "not_of_numbers": (masked(lambda s: torch.logical_not(additive(s))), "unknown", "no comparison"),
    "both_of_numbers": (masked(lambda s: torch.logical_and(additive(s), additive(s))), "unknown", "no comparison"),
    "mask_filled_with_numbers": (
        masked(lambda s: torch.zeros(s.n, LENGTH, dtype=torch.bool).masked_fill(~causal(s), -1e5)),
        "unknown",
        "no comparison",
    ),
    "subtracted": (masked(lambda s: torch.add(torch.zeros(s.n, LENGTH), additive(s), alpha=-1)), "unknown", "no comparison"),
    "softmax_subtracted": (composed(lambda scores, s: torch.add(scores, additive(s), alpha=-1)), "refuted", "has no mask"),
    "softmax_minus": (composed(lambda scores, s: additive(s) - scores), "refuted", "has no mask"),
    "softmax_plus_boolean": (composed(lambda scores, s: scores + causal(s)), "refuted", "has no mask"),
    "softmax_where_zero": (composed(lambda scores, s: torch.where(causal(s), scores, 0.0)), "unknown", "no comparison"),
    "softmax_filled_with_zero": (composed(lambda scores, s: scores.masked_fill(~causal(s), 0.0)), "unknown", "no comparison"),
    "capped_after_the_mask": (composed(lambda scores, s: 5 * torch.tanh((scores + additive(s)) / 5)), "refuted", "has no mask"),
    "clamped_after_the_mask": (composed(lambda scores, s: (scores + additive(s)).clamp(-1, 1)), "refuted", "has no mask"),
    "turned_after_the_mask": (composed(lambda scores, s: -1 * (scores + additive(s))), "refuted", "has no mask"),
    "shown_again": (
        composed(lambda scores, s: (scores + additive(s)).masked_fill(s.padding, 0.0)),
        "unknown",
        "no comparison",
    ),
    "shown_again_where": (
        composed(lambda scores, s: torch.where(s.padding, scores + additive(s), 0.0)),
        "unknown",
        "no comparison",
    ),
    "some_heads_alone": (
        composed(lambda scores, s: torch.cat([(scores + additive(s))[:, :2], scores[:, 2:]], 1)),
        "refuted",
        "has no mask",
    ),
    "one_softmax_of_two": (_two_softmaxes, "refuted", "has no mask"),
    "projected_and_frozen": (
        lambda q, k, v, s: masked(lambda s: s.cells <= s.queries)(
            q, torch.nn.functional.linear(k, s.weight), torch.nn.functional.linear(v, s.weight), s
        ),
        "refuted",
        "masks from 0 on",
    ),
    "exponentials": (_exponentials, "unknown", "how it masks is not known"),
    "products_summed": (_products_summed, "unknown", "how it masks is not known"),
    "inverted_softmax": (
        composed(lambda scores, s: scores.masked_fill(causal(s), -math.inf)),
        "refuted",
        "hides a query's own cell",
    ),
}


class Layers(nn.Module):
    def __init__(self, attentions: dict[str, Attend]) -> None:
        super().__init__()
        self.attentions = attentions
        self.k, self.v = nn.Module(), nn.Module()
        self.register_buffer("weight", torch.eye(HEAD_DIM))
        for name in attentions:
            for store in (self.k, self.v):
                store.register_buffer(name, torch.zeros(BATCH, HEADS, LENGTH, HEAD_DIM))

    def forward(self, x: Tensor, q: Tensor, p: Tensor, p_rows: Tensor, other: Tensor, padding: Tensor) -> list[Tensor]:
        start = Start(p, p_rows, other, padding, self.weight, x.shape[2])
        index = torch.arange(x.shape[2]) + p
        outputs = []
        for name, attention in self.attentions.items():
            k, v = getattr(self.k, name), getattr(self.v, name)
            k.index_copy_(2, index, x)
            v.index_copy_(2, index, x)
            outputs.append(attention(q, k, v, start))
        return outputs


def _declared(names: list[str]) -> dict[str, CacheDecl]:
    return {f"{kind}.{name}": CacheDecl(f"{kind}.{name}", layer=layer) for layer, name in enumerate(names) for kind in "kv"}


def _prove(layers: nn.Module, names: list[str]) -> ProofReport:
    load_ops()
    n = Dim("n", min=5, max=12)
    inputs = (
        torch.randn(BATCH, HEADS, 6, HEAD_DIM),
        torch.randn(BATCH, HEADS * GROUP, 6, HEAD_DIM),
        torch.tensor(3),
        torch.tensor([3, 4], dtype=torch.int32),
        torch.tensor(3),
        torch.ones(6, LENGTH, dtype=torch.bool),
    )
    program = export(layers, inputs, dynamic_shapes=({2: n}, {2: n}, None, None, None, {0: n}))
    return prove_program(program, program.run_decompositions(), _declared(names))


@pytest.fixture(scope="module")
def report() -> ProofReport:
    attentions = FOLLOWS | {name: attention for name, (attention, *_) in STRAYS.items()}
    return _prove(Layers(attentions), list(attentions))


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("name", FOLLOWS)
def test_masks_that_follow_the_write_are_proved(report: ProofReport, name: str, kind: str) -> None:
    assert report[f"{kind}.{name}"].reason == ""


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("name", STRAYS)
def test_masks_that_stray_are_refused_for_both_caches(report: ProofReport, name: str, kind: str) -> None:
    _, verdict, reason = STRAYS[name]
    proof = report[f"{kind}.{name}"]
    for stage in (proof.before, proof.after):
        assert str(stage.verdict).startswith(verdict), proof
    assert reason in proof.reason


def _weights_turned(q: Tensor, k: Tensor, v: Tensor, s: Start) -> Tensor:
    weights = torch.softmax(q @ _repeated(k).transpose(2, 3) + additive(s), -1)
    return torch.cat([weights[..., 4:], weights[..., :4]], -1) @ _repeated(v)


TURNED: dict[str, tuple[str, Attend]] = {
    # What is read in another order than the mask, or the weights, have it: the cache it is, and how.
    "cells": ("k", lambda q, k, v, s: masked(causal)(q, torch.cat([k[:, :, 4:], k[:, :, :4]], 2), v, s)),
    "chunks": ("k", lambda q, k, v, s: masked(causal)(q, torch.cat(k.chunk(4, 2)[::-1], 2), v, s)),
    "every_other_cell": ("k", lambda q, k, v, s: masked(causal)(q, torch.cat([k[:, :, ::2], k[:, :, 1::2]], 2), v, s)),
    "cells_for_heads": ("k", lambda q, k, v, s: masked(causal)(q, k.view(BATCH, HEADS, HEAD_DIM, LENGTH).transpose(2, 3), v, s)),
    "rows": ("k", lambda q, k, v, s: masked(causal)(q, torch.cat([k[1:], k[:1]]), v, s)),
    "scores": ("k", composed(lambda x, s: torch.cat([x[..., 4:], x[..., :4]], -1) + additive(s))),
    "queries": ("k", composed(lambda x, s: torch.cat([x[..., 1:, :], x[..., :1, :]], -2) + additive(s))),
    "values": ("v", lambda q, k, v, s: masked(causal)(q, k, torch.cat([v[:, :, 4:], v[:, :, :4]], 2), s)),
    "weights": ("v", _weights_turned),
}


@pytest.fixture(scope="module")
def turned() -> ProofReport:
    return _prove(Layers({name: attention for name, (_, attention) in TURNED.items()}), list(TURNED))


@pytest.mark.parametrize("name", TURNED)
def test_cells_rows_and_queries_keep_their_order(turned: ProofReport, name: str) -> None:
    kind, _ = TURNED[name]
    proof = turned[f"{kind}.{name}"]
    assert [type(stage.verdict) for stage in (proof.before, proof.after)] == [Unknown, Unknown]
    assert "how it masks is not known" in proof.reason


class _CrossedLayers(Layers):
    """Layer `a` attends over its own keys and the values of layer `b`; the caches of `c` are written from two starts."""

    def forward(self, x: Tensor, q: Tensor, p: Tensor, p_rows: Tensor, other: Tensor, padding: Tensor) -> list[Tensor]:
        outputs = []
        for store, start in ((self.k, p), (self.v, p)):
            for name in "ab":
                getattr(store, name).index_copy_(2, torch.arange(x.shape[2]) + start, x)
        self.k.c.index_copy_(2, torch.arange(x.shape[2]) + p, x)
        self.v.c.index_copy_(2, torch.arange(x.shape[2]) + p + 1, x)
        follow = attend(lambda s: s.p.expand(BATCH).int())
        start = Start(p, p_rows, other, padding, self.weight, x.shape[2])
        for k, v in ((self.k.a, self.v.b), (self.k.b, self.v.a), (self.k.c, self.v.c)):
            outputs.append(follow(q, k, v, start))
        return outputs


def test_keys_and_values_belong_together() -> None:
    report = _prove(_CrossedLayers(dict.fromkeys("abc", attend(lambda s: s.p))), list("abc"))
    assert "together with v.b of another layer" in report["k.a"].reason
    assert "together with k.b of another layer" in report["v.a"].reason
    assert "k.c is written from p on, v.c from p + 1 on" in report["k.c"].reason
    assert "v.c is written from p + 1 on, attend_2 masks from p on" in report["v.c"].reason
