"""Choosing what a garbage collection removes, for any store."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from shared.artifacts.collection import choose_removals
from shared.artifacts.store import ArtifactInfo
from shared.ids import ArtifactId

NOW = 1000.0


@st.composite
def stores(draw: st.DrawFn) -> list[ArtifactInfo]:
    """Up to eight artifacts; an engine may need any model, stored or not."""
    count = draw(st.integers(0, 8))
    infos = []
    for number in range(count):
        needs = draw(st.none() | st.integers(0, 9))
        infos.append(
            ArtifactInfo(
                artifact_id=ArtifactId(f"{number:064x}"),
                kind="model" if needs is None else "engine",
                model_id=None if needs is None or needs == number else ArtifactId(f"{needs:064x}"),
                size_bytes=draw(st.integers(0, 100)),
                published_s=0.0,
                last_used_s=float(draw(st.integers(0, 999))),
                in_use=draw(st.booleans()),
            )
        )
    return infos


@given(infos=stores(), max_bytes=st.none() | st.integers(0, 500), max_age_s=st.none() | st.integers(0, 1000))
def test_a_choice_keeps_what_it_must_and_removes_no_more_than_asked(
    infos: list[ArtifactInfo], max_bytes: int | None, max_age_s: int | None
) -> None:
    removed = choose_removals(infos, now_s=NOW, max_bytes=max_bytes, max_age_s=max_age_s)
    by_id = {info.artifact_id: info for info in infos}
    assert len(set(removed)) == len(removed)
    left = dict(by_id)
    for artifact_id in removed:  # in this order, nothing is removed from under an engine that is still there
        info = left.pop(artifact_id)
        assert not info.in_use
        assert artifact_id not in {other.model_id for other in left.values()}
        too_old = max_age_s is not None and info.last_used_s < NOW - max_age_s
        over = max_bytes is not None and sum(other.size_bytes for other in left.values()) + info.size_bytes > max_bytes
        assert too_old or over
    needed = {info.model_id for info in left.values()}
    free = [info for info in left.values() if not info.in_use and info.artifact_id not in needed]
    if max_age_s is not None:
        assert all(info.last_used_s >= NOW - max_age_s for info in free)
    if max_bytes is not None and free:
        assert sum(info.size_bytes for info in left.values()) <= max_bytes
    if max_bytes is None and max_age_s is None:
        assert removed == ()
