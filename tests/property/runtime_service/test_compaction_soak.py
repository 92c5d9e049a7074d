"""The soak of `make compaction-soak`, short."""

from __future__ import annotations

from tests.property.compaction_soak import POLICIES, Soak


def test_rounds_of_every_kind_leave_no_page_behind_and_every_request_its_own_tokens() -> None:
    soak = Soak(seed=3)
    soak.run(rounds=100)
    assert set(soak.sessions) == set(POLICIES)
    assert min(session.compactor.evidence.rounds for session in soak.sessions.values()) > 5
    assert soak.cancelled > 0
    assert min(session.statistics.prefix_hits for session in soak.sessions.values() if session.prefixes.enabled) > 0
    assert sum(session.scheduler.num_preemptions for session in soak.sessions.values()) > 0
