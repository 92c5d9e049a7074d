"""What only a bucket can do wrong: races without locks, caches, outages, garbage of writers that lost."""

from __future__ import annotations

import sys
from pathlib import Path

import obstore
import pytest

from shared.artifacts import bucket
from shared.artifacts.host_cache import Content, HostCache
from shared.artifacts.locate import StoreLocation, open_store
from shared.artifacts.object import ObjectStore
from shared.artifacts.record import MANIFEST_NAME, ManifestHead
from shared.artifacts.staging import STALE_STAGING_S
from shared.artifacts.store import ArtifactInfo
from shared.errors import ArtifactCorrupt, ArtifactNotFound, BackendUnavailable, FieldOutOfRange, InUse, StoreUnavailable
from tests.support.artifact_stores import BUCKET, FILES, A, B, S3Backend, contents, publish, s3_environment


def test_the_manifest_is_put_last(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens while files are uploaded, nothing is visible."""
    store = s3.open()
    put = s3.bucket.put
    uploads: list[str] = []

    def fail_at_second(path: str, content: bytes | Path) -> None:
        assert not s3.open().contains(A)
        if uploads:
            raise StoreUnavailable("cut off")
        uploads.append(path)
        put(path, content)

    monkeypatch.setattr(s3.bucket, "put", fail_at_second)
    with pytest.raises(StoreUnavailable):
        publish(store)
    monkeypatch.setattr(s3.bucket, "put", put)
    assert not s3.open().contains(A)
    assert s3.open().list() == ()
    assert publish(store)
    assert contents(s3.open()) == FILES


def test_a_writer_that_loses_the_race_changes_nothing(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both saw no manifest; the conditional put lets one through."""
    late, other = s3.open(), FILES | {"engine.bin": b"of the loser"}
    tag = s3.bucket.tag
    monkeypatch.setattr(s3.bucket, "tag", lambda _: None)
    publish(s3.open())
    assert not publish(late, files=other)
    monkeypatch.setattr(s3.bucket, "tag", tag)
    assert contents(s3.open()) == FILES


def test_two_repairs_of_a_damaged_artifact_leave_one_whole(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both saw the damage; replacing is conditional on the manifest they saw."""
    publish(s3.open())
    s3.damage(A, "engine.bin", lambda content: content[:-1])
    old = s3.bucket.tag(f"{A}/{MANIFEST_NAME}")
    repaired = FILES | {"engine.bin": b"first repair"}
    assert publish(s3.open(), files=repaired)
    monkeypatch.setattr(s3.bucket, "tag", lambda _: old)
    monkeypatch.setattr(ObjectStore, "_is_damaged", lambda *_: True)
    assert not publish(s3.open(), files=FILES | {"engine.bin": b"second repair"})
    monkeypatch.undo()
    assert contents(s3.open()) == repaired


def test_what_a_losing_or_dying_writer_uploaded_is_collected_after_a_day(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(s3.open())
    monkeypatch.setattr(s3.bucket, "tag", lambda _: None)
    lost = FILES | {"engine.bin": b"l" * 5000}
    publish(s3.open(), files=lost)
    monkeypatch.undo()
    s3.bucket.put(f"{B}/files/{'0' * 32}/{'0' * 64}", b"d" * 3000)
    s3.bucket.put("not-an-artifact/file", b"of somebody else")
    store = s3.open()
    assert store.gc().freed_bytes == 0, "it may be an upload under way"
    s3.clock.advance(STALE_STAGING_S + 60)
    report = store.gc()
    assert report.freed_bytes == 3000 + sum(map(len, lost.values()))
    assert s3.bucket.get("not-an-artifact/file") == b"of somebody else"
    assert contents(s3.open()) == FILES


def test_an_artifact_is_fetched_once_a_host(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(s3.open())
    host = s3.open()
    contents(host)
    monkeypatch.setattr(s3.bucket, "stream", lambda _: pytest.fail("fetched again"))
    assert contents(host) == FILES


def test_a_damaged_cache_is_fetched_anew(s3: S3Backend) -> None:
    publish(s3.open())
    host = s3.open()
    with host.open(A) as handle:
        for name in ("engine.bin", "tokenizer/vocab.json"):
            handle.path(name).write_bytes(b"damaged")
    assert contents(host) == FILES


def test_the_cache_follows_the_bucket(s3: S3Backend) -> None:
    """Deleted and built anew with other bytes: the copy of the first build is not served, even while it is open."""
    publish(s3.open())
    host, other = s3.open(), FILES | {"engine.bin": b"second build"}
    with host.open(A) as first:
        s3.bucket.delete([item.path for item in s3.bucket.items()])
        with pytest.raises(ArtifactNotFound):
            host.open(A)
        publish(s3.open(), files=other)
        assert contents(host) == other
        assert first.artifact_id == A


def test_the_cache_is_bounded(s3: S3Backend) -> None:
    s3.cache_bytes = 15_000
    for number in range(3):
        publish(s3.open(), f"{number:064x}", {"f": b"x" * 10_000})
    host = s3.open()
    for number in range(3):
        contents(host, f"{number:064x}")
        s3.clock.advance(10)
    assert len(host._cache.store.list()) == 1


def test_two_processes_that_fill_one_cache_both_open(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process publishes its copy while this one still downloads; neither takes the other's away."""
    publish(s3.open())
    host = s3.open()
    twin = ObjectStore(s3.bucket, HostCache(host._cache.store, s3.cache_bytes), clock=s3.clock)
    fetch, opened = host._cache._fetch, []

    def fetch_late(manifest: bytes, head: ManifestHead, content: Content) -> None:
        opened.append(twin.open(A))
        fetch(manifest, head, content)

    monkeypatch.setattr(host._cache, "_fetch", fetch_late)
    assert contents(host) == FILES
    assert {name: path.read_bytes() for name, path in opened[0].paths.items()} == FILES
    opened[0].close()


@pytest.mark.parametrize("remove", ["gc", "delete"])
def test_a_reader_that_comes_between_the_choice_and_the_removal_keeps_its_artifact(
    s3: S3Backend, monkeypatch: pytest.MonkeyPatch, remove: str
) -> None:
    """BR-149 without a lock that spans hosts."""
    publish(s3.open())
    collector, reader = s3.open(), s3.open()
    listed, handles = collector.list, []

    def list_then_open() -> tuple[ArtifactInfo, ...]:
        infos = listed()
        handles.append(reader.open(A))
        return infos

    monkeypatch.setattr(collector, "list", list_then_open)
    if remove == "gc":
        report = collector.gc(max_bytes=0)
        assert (report.removed, report.failed, report.freed_bytes) == ((), (A,), 0)
    else:
        with pytest.raises(InUse, match="meanwhile"):
            collector.delete(A)
    handles[0].close()
    assert contents(s3.open()) == FILES


def test_a_publication_between_the_two_steps_of_a_removal_is_whole(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is gone, its content listed and about to go: what is published now is not among it."""
    publish(s3.open())
    writer, delete, published = s3.open(), s3.bucket.delete, []

    def delete_late(paths: list[str]) -> None:
        if any("/files/" in path for path in paths):
            monkeypatch.setattr(s3.bucket, "delete", delete)
            published.append(publish(writer))
        delete(paths)

    monkeypatch.setattr(s3.bucket, "delete", delete_late)
    s3.open().gc(max_bytes=0)
    monkeypatch.undo()
    assert published == [True]
    assert contents(s3.open()) == FILES


def test_of_two_removals_one_that_gives_way_to_a_reader_leaves_it_whole(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one has taken the manifest and is about to put it back for the reader's sake; the other begins as the reader leaves."""
    publish(s3.open())
    collector, create = s3.open(), s3.bucket.create
    listed, handles = collector.list, []

    def list_then_open() -> tuple[ArtifactInfo, ...]:
        infos = listed()
        handles.append(s3.open().open(A))
        return infos

    def create_late(path: str, content: bytes) -> bool:
        if path.endswith(MANIFEST_NAME):
            handles.pop().close()
            assert not other._remove(A, items)
        return create(path, content)

    other = s3.open()
    items = other._items(A)[A]
    monkeypatch.setattr(collector, "list", list_then_open)
    monkeypatch.setattr(s3.bucket, "create", create_late)
    assert collector.gc(max_bytes=0).removed == ()
    assert contents(s3.open()) == FILES


def test_a_publication_under_way_is_not_removed_with_what_was_there(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began while a removal had the manifest in its hands and ends after the next one: its content was listed by that."""
    publish(s3.open())
    create, stored = s3.bucket.create, s3.read(f"{A}/{MANIFEST_NAME}")
    s3.bucket.delete([f"{A}/{MANIFEST_NAME}"])

    def create_late(path: str, content: bytes) -> bool:
        monkeypatch.setattr(s3.bucket, "create", create)
        create(path, stored)
        assert s3.open().gc(max_bytes=0).removed == (A,)
        return create(path, content)

    monkeypatch.setattr(s3.bucket, "create", create_late)
    assert publish(s3.open())
    assert contents(s3.open()) == FILES


def test_what_was_chosen_is_removed_and_not_what_is_being_published_since(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the choice and the second look another has removed it, and a publication has begun."""
    publish(s3.open())
    collector, items, create = s3.open(), ObjectStore._items, s3.bucket.create

    def create_late(path: str, content: bytes) -> bool:
        if path.endswith(MANIFEST_NAME):
            monkeypatch.setattr(s3.bucket, "create", create)
            assert collector._remove(A, items(collector, A)[A])
        return create(path, content)

    s3.open().delete(A)
    monkeypatch.setattr(s3.bucket, "create", create_late)
    assert publish(s3.open())
    assert contents(s3.open()) == FILES


def test_a_removal_that_died_is_nobody_s_hindrance(s3: S3Backend) -> None:
    publish(s3.open())
    with s3.open()._leases.removal(A) as first, s3.open()._leases.removal(A) as second:
        assert (first, second) == (True, False)
        assert s3.open().gc(max_bytes=0).failed == (A,)
    s3.bucket.put(f"{A}/removal", repr(s3.clock() - 1).encode())
    assert s3.open().gc(max_bytes=0).removed == (A,)
    assert s3.stored_bytes() == 0


def test_what_is_removed_while_it_is_published_again_is_published(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(s3.open())
    tag = s3.bucket.tag

    def tag_then_remove(path: str) -> str | None:
        found = tag(path)
        monkeypatch.setattr(s3.bucket, "tag", tag)
        s3.open().delete(A)
        return found

    monkeypatch.setattr(s3.bucket, "tag", tag_then_remove)
    assert publish(s3.open())
    assert contents(s3.open()) == FILES


def test_an_artifact_deleted_during_its_download_is_not_found(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(s3.open())
    stream = s3.bucket.stream

    def vanish(path: str) -> object:
        s3.bucket.delete([item.path for item in s3.bucket.items()])
        return stream(path)

    monkeypatch.setattr(s3.bucket, "stream", vanish)
    with pytest.raises(ArtifactNotFound):
        s3.open().open(A)


def test_large_content_is_asked_for_in_pieces(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of obstore lasts 30 s at most, whatever it brings: many gigabytes of weights take longer."""
    monkeypatch.setattr(bucket, "PIECE_BYTES", 1000)
    content = bytes(range(256)) * 10
    publish(s3.open(), A, {"engine.bin": content, "empty": b""})
    ranges = []
    get_range = obstore.get_range
    monkeypatch.setattr(obstore, "get_range", lambda *names, **bounds: ranges.append(bounds) or get_range(*names, **bounds))
    assert contents(s3.open()) == {"engine.bin": content, "empty": b""}
    assert ranges == [{"start": s, "end": min(s + 1000, 2560)} for s in (0, 1000, 2000)]


def test_content_of_any_size_goes_in_as_many_parts_as_s3_takes() -> None:
    for size in (0, 5 << 20, 50_000 << 20, 140 << 30):
        part = bucket.part_bytes(size)
        assert part >= 5 << 20
        assert part * 10_000 >= size
    assert bucket.part_bytes(1 << 30) == 5 << 20


def test_a_removal_that_fails_half_way_is_tried_again(s3: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-150."""
    publish(s3.open())
    delete = s3.bucket.delete

    def fail(paths: list[str]) -> None:
        if f"{A}/{MANIFEST_NAME}" not in paths and paths:
            raise StoreUnavailable("cut off")
        delete(paths)

    monkeypatch.setattr(s3.bucket, "delete", fail)
    report = s3.open().gc(max_bytes=0)
    assert (report.removed, report.failed, report.freed_bytes) == ((), (A,), 0)
    assert report.left_bytes >= s3.stored_bytes() > 0
    monkeypatch.undo()
    s3.clock.advance(STALE_STAGING_S + 60)
    assert s3.open().gc().freed_bytes > 0
    assert s3.stored_bytes() == 0


def test_lapsed_leases_are_collected_and_live_ones_are_not(s3: S3Backend) -> None:
    publish(s3.open())
    s3.bucket.put(f"{A}/leases/dead", repr(s3.clock() - 1).encode())
    s3.bucket.put(f"{A}/leases/live", repr(s3.clock() + 3600).encode())
    s3.open().gc()
    assert [item.path for item in s3.bucket.items(f"{A}/leases")] == [f"{A}/leases/live"]


def test_times_that_are_no_times_do_not_stop_a_listing(s3: S3Backend) -> None:
    publish(s3.open())
    s3.bucket.put(f"{A}/used", b"\xff")
    s3.bucket.put(f"{A}/leases/x", b"for ever")
    (info,) = s3.open().list()
    assert not info.in_use
    s3.open().delete(A)
    assert s3.stored_bytes() == 0


def test_a_manifest_nobody_can_read_protects_its_files_from_collection(s3: S3Backend) -> None:
    publish(s3.open())
    s3.damage(A, MANIFEST_NAME, lambda content: content[:-1])
    before = s3.stored_bytes()
    s3.clock.advance(STALE_STAGING_S + 60)
    s3.open().gc()
    assert s3.stored_bytes() == before
    with pytest.raises(ArtifactCorrupt):
        s3.open().open(A)


def test_a_bucket_that_does_not_answer_is_a_typed_error(s3: S3Backend) -> None:
    gone = S3Backend("http://127.0.0.1:1", "prefix", s3.caches)
    store = gone.open()
    for act in (store.list, store.gc, lambda: store.open(A), lambda: publish(store), lambda: store.contains(A)):
        with pytest.raises(StoreUnavailable) as caught:
            act()
        assert "\n" not in caught.value.message


def test_an_s3_url_is_a_bucket(s3_url: str, s3: S3Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_environment(s3_url).items():
        monkeypatch.setenv(name, value)
    store = open_store(StoreLocation(f"s3://{BUCKET}/{s3.prefix}", str(tmp_path / "cache"), 1 << 30))
    assert publish(store)
    assert contents(s3.open()) == FILES


@pytest.mark.parametrize("place", ["gs://x", "s3://", "s3:///x"])
def test_other_urls_are_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(FieldOutOfRange, match=f"s3://bucket/prefix or a directory; got '{place}'"):
        open_store(StoreLocation(place, str(tmp_path), 0))


def test_a_bucket_without_its_extra_is_a_typed_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(BackendUnavailable, match=r"quire\[s3\]"):
        open_store(StoreLocation("s3://bucket", str(tmp_path), 1 << 30))
    monkeypatch.setitem(sys.modules, "shared.artifacts.signing", None)
    with pytest.raises(BackendUnavailable, match=r"quire\[signing\]"):
        open_store(StoreLocation(str(tmp_path), "", 0), trusted_keys=[tmp_path / "key"])
