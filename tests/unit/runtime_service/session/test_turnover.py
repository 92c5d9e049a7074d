"""The hint of a full queue follows what requests take."""

from __future__ import annotations

import pytest

from runtime_service.session.turnover import Turnover


def test_the_hint_approaches_the_running_time_over_the_places() -> None:
    turnover = Turnover(num_places=4)
    before = turnover.seconds
    turnover.note(ran_s=40.0)
    assert before < turnover.seconds < 10.0
    for _ in range(60):
        turnover.note(ran_s=40.0)
    assert turnover.seconds == pytest.approx(10.0, rel=0.01)
