"""Reports: what is certified, what is refused, and what `quire explain` prints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compiler_service.proof.algebra import ONE, Linear, constant, opaque, symbol
from compiler_service.proof.certificate import CacheProof, ProofReport, WriteProof
from compiler_service.proof.verdict import Proved, Refuted, Run, Unknown, Verdict
from shared.errors import WriteNotProven

START = opaque("start", [], given=True).base
INNER = opaque("clamp", []).base
RUN = Run("k_cache.0", axis=2, start=START, length=constant(4), rows=ONE)


def write(verdict: Verdict, cache: str = "k_cache.0", node: str = "index_put") -> WriteProof:
    return WriteProof(cache, node, "index_put", verdict, "update", (0, 1, 2, 3))


def proof(before: Verdict, after: Verdict, cache: str = "k_cache.0") -> CacheProof:
    return CacheProof(write(before, cache, "index_copy"), write(after, cache))


def test_a_proven_cache_is_certified_with_its_run() -> None:
    certificate = proof(Proved(RUN), Proved(RUN)).certificate()
    assert (certificate.node, certificate.axis, certificate.start, certificate.length) == ("index_put", 2, "start", "4")
    assert (certificate.verdict_before, certificate.verdict_after, certificate.reason) == ("proved", "proved", "")
    assert (certificate.binding, certificate.aliased) == ("", False)  # the builder has not read anything back yet


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (Refuted("step 2", "index"), Proved(RUN), "before lowering: refuted: step 2 (node index)"),
        (Proved(RUN), Unknown("gone", "frozen"), "after lowering: unknown: gone (node frozen)"),
        (Proved(RUN), Proved(replace(RUN, length=constant(5))), "the run changed"),
        (Proved(RUN), Proved(replace(RUN, start=START + ONE)), "the run changed"),
        (Proved(RUN), Proved(replace(RUN, axis=1)), "the run changed"),
    ],
)
def test_both_forms_must_be_proved_and_be_one_run(before: Verdict, after: Verdict, reason: str) -> None:
    found = proof(before, after)
    assert not found.ok
    assert found.reason.startswith(reason)


@pytest.mark.parametrize("after", [INNER, opaque("clamp_min", []).base, constant(3)])
def test_lowering_may_rename_or_fold_what_is_inside_the_program(after: Linear) -> None:
    assert proof(Proved(replace(RUN, start=INNER)), Proved(replace(RUN, start=after))).ok


def test_sizes_are_compared_too() -> None:
    n, m = symbol("n", nonnegative=True, given=True), symbol("m", nonnegative=True, given=True)
    assert not proof(Proved(replace(RUN, length=n)), Proved(replace(RUN, length=m))).ok


def test_a_report_refuses_by_cache_node_and_reason() -> None:
    good = proof(Proved(RUN), Proved(RUN))
    bad = proof(Unknown("roll", "roll_1"), Unknown("roll", "roll_1"), "v_cache.0")
    report = ProofReport((good, bad))
    assert not report.ok
    assert report.refusals == (bad,)
    assert report.proven_nodes == {"index_put"}
    assert report["v_cache.0"] is bad
    with pytest.raises(KeyError):
        report["v_cache.1"]
    with pytest.raises(
        WriteNotProven, match=r"1 of 2 are not proven:\n  v_cache\.0: before lowering: unknown: roll \(node roll_1\)"
    ) as error:
        report.require()
    assert set(error.value.details) == {"v_cache.0"}
    assert [(row.cache, row.verdict, row.reason) for row in report.rows()] == [
        ("k_cache.0", "proved", ""),
        ("v_cache.0", "refused", "before lowering: unknown: roll (node roll_1)"),
    ]
    assert report.rows()[0].run == "rows 0..1, cells start .. + 4 of axis 2"


def test_a_report_of_proven_caches_requires_nothing() -> None:
    ProofReport((proof(Proved(RUN), Proved(RUN)),)).require()
