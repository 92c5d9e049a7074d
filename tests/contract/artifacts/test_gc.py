"""Removing artifacts: by hand and by age and size, never what is in use, with nothing left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import shared.artifacts.local
from shared.artifacts.lease import LEASE_TTL_S
from shared.artifacts.object import ObjectStore
from shared.artifacts.store import ArtifactStore
from shared.errors import ArtifactNotFound, InUse
from tests.support.artifact_stores import FILES, A, B, Backend, C, D, S3Backend, contents, publish

BIG = {"engine.bin": b"x" * 10_000}
DAY_S = 86_400.0


def ids(store: ArtifactStore) -> set[str]:
    return {info.artifact_id for info in store.list()}


def publish_one_after_another(backend: Backend, *artifact_ids: str) -> None:
    """Each is opened a little later than the one before: S3 tells publication times in whole seconds."""
    store = backend.open()
    for artifact_id in artifact_ids:
        publish(store, artifact_id, BIG)
        backend.clock.advance(10)
        contents(store, artifact_id)


def test_a_deleted_artifact_is_gone_with_its_bytes(backend: Backend) -> None:
    store = backend.open()
    publish(store, A, BIG)
    publish(store, B)
    store.delete(A)
    assert ids(store) == {B}
    assert backend.stored_bytes() < 10_000
    with pytest.raises(ArtifactNotFound):
        store.open(A)
    with pytest.raises(ArtifactNotFound):
        store.delete(A)
    assert publish(store, A), "and can be published again"


def test_what_is_open_cannot_be_deleted(backend: Backend) -> None:
    publish(backend.open())
    with backend.open().open(A):
        with pytest.raises(InUse):
            backend.open().delete(A)
        assert [info.in_use for info in backend.open().list()] == [True]
    backend.open().delete(A)


def test_a_model_cannot_be_deleted_before_its_engines(backend: Backend) -> None:
    store = backend.open()
    publish(store, B)
    publish(store, A, model_id=B)
    with pytest.raises(InUse, match=A):
        store.delete(B)
    store.delete(A)
    store.delete(B)
    assert ids(store) == set()


def test_a_collection_without_limits_removes_nothing(backend: Backend) -> None:
    publish(backend.open())
    backend.clock.advance(1000 * DAY_S)
    report = backend.open().gc()
    assert (report.removed, report.failed, report.freed_bytes) == ((), (), 0)
    assert contents(backend.open()) == FILES


def test_artifacts_unused_for_long_are_removed(backend: Backend) -> None:
    store = backend.open()
    publish_one_after_another(backend, A, B)
    backend.clock.advance(2 * DAY_S)
    contents(store, A)
    backend.clock.advance(2 * DAY_S)
    report = store.gc(max_age_s=3 * DAY_S)
    assert report.removed == (B,)
    assert report.freed_bytes >= 10_000
    assert ids(store) == {A}


def test_the_least_recently_used_go_until_the_quota_holds(backend: Backend) -> None:
    """BR-150: quota of two artifacts, four stored: bytes fall."""
    store = backend.open()
    publish_one_after_another(backend, A, B, C, D)
    contents(store, A)
    report = store.gc(max_bytes=25_000)
    assert (report.removed, ids(store)) == ((B, C), {A, D})
    assert report.left_bytes <= 25_000
    assert report.freed_bytes >= 20_000
    assert store.gc(max_bytes=25_000).removed == ()


def test_leased_and_loading_artifacts_are_kept_whatever_the_limits(backend: Backend) -> None:
    """BR-149: four variants, one loaded by a runtime on another host, another loading now."""
    publish_one_after_another(backend, A, B, C, D)
    store, runtime = backend.open(), backend.open()
    with runtime.open(A), runtime.open(C) as loading:
        report = store.gc(max_bytes=0, max_age_s=0)
        assert set(report.removed) == {B, D}
        assert ids(store) == {A, C}
        assert loading.path("engine.bin").read_bytes() == BIG["engine.bin"]
    assert set(store.gc(max_bytes=0).removed) == {A, C}


def test_an_artifact_is_leased_before_its_bytes_are_checked(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-149: a collection in the middle of an open must not take the artifact away."""
    publish(backend.open())
    seen: list[bool] = []
    check = shared.artifacts.local.check_files

    def look(*args: object) -> None:
        seen.extend(info.in_use for info in backend.open().list())
        backend.open().gc(max_bytes=0)
        check(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(shared.artifacts.local, "check_files", look)
    with backend.open().open(A):
        assert seen
        assert all(seen)
        assert ids(backend.open()) == {A}


@pytest.mark.parametrize("verb", ["publish", "verify"])
def test_what_is_looked_at_is_not_removed_under_the_looker(backend: Backend, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """A build of hours ends with the look at what is there already: a collection at that moment must not fail it."""
    publish(backend.open())
    store, removed = backend.open(), []

    def meddle(genuine: Callable[..., None]) -> Callable[..., None]:
        def check(*arguments: object) -> None:
            if "staging" not in str(arguments[0]):  # that is the writer's own
                removed.append(backend.open().gc(max_bytes=0).removed)
            genuine(*arguments)

        return check

    monkeypatch.setattr(shared.artifacts.local, "check_files", meddle(shared.artifacts.local.check_files))
    monkeypatch.setattr(ObjectStore, "_check_files", meddle(ObjectStore._check_files))
    assert publish(store) is False if verb == "publish" else store.verify(A) is None
    assert set(removed) == {()}
    assert contents(backend.open()) == FILES


def test_the_lease_of_a_dead_holder_lapses(s3: S3Backend) -> None:
    """BR-149: it protects for its time, then no longer. For a directory's, see test_local.py."""
    publish(s3.open())
    handle = s3.open().open(A)  # its thread renews on the real clock: within this test, never
    s3.clock.advance(LEASE_TTL_S - 5)
    assert s3.open().gc(max_bytes=0).removed == ()
    s3.clock.advance(10)
    assert s3.open().gc(max_bytes=0).removed == (A,)
    handle.close()


def test_closing_twice_or_after_a_collection_is_harmless(backend: Backend) -> None:
    publish(backend.open())
    handle = backend.open().open(A)
    handle.close()
    handle.close()
    assert backend.open().gc(max_bytes=0).removed == (A,)
    handle.close()


def test_two_handles_hold_until_both_are_closed(backend: Backend) -> None:
    publish(backend.open())
    store = backend.open()
    one, other = store.open(A), store.open(A)
    one.close()
    assert store.gc(max_bytes=0).removed == ()
    other.close()
    assert store.gc(max_bytes=0).removed == (A,)


def test_a_model_stays_as_long_as_one_of_its_engines(backend: Backend) -> None:
    store = backend.open()
    publish(store, D, BIG)
    publish(store, A, model_id=D)
    publish(store, B, model_id=D)
    with store.open(A):
        assert store.gc(max_bytes=0).removed == (B,)
        assert ids(store) == {A, D}
    assert store.gc(max_bytes=0).removed == (A, D), "the engine first"


def test_a_refused_open_leaves_no_lease(backend: Backend) -> None:
    with pytest.raises(ArtifactNotFound):
        backend.open().open(A)
    publish(backend.open())
    assert backend.open().gc(max_bytes=0).removed == (A,)
    assert backend.stored_bytes() == 0
