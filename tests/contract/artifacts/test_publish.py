"""Publishing: whole or not at all, once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from shared.artifacts.files import describe_files
from shared.artifacts.store import ArtifactStore
from shared.errors import ArtifactCorrupt, ArtifactNotFound, FieldOutOfRange
from tests.support.artifact_stores import FILES, A, B, Backend, C, contents, fill, manifest_of, publish


def test_what_was_published_is_what_is_opened(backend: Backend) -> None:
    store = backend.open()
    with store.stage() as staged:
        fill(staged, FILES)
        manifest = manifest_of(A, describe_files(staged))
        assert store.publish(A, staged, manifest)
    reader = backend.open()
    with reader.open(A) as handle:
        assert (handle.artifact_id, handle.manifest_bytes) == (A, manifest)
        assert {name: handle.path(name).read_bytes() for name in handle.paths} == FILES
        with pytest.raises(ArtifactNotFound, match="no file"):
            handle.path("manifest.json")
        handle.close()
    assert reader.manifest(A) == manifest
    reader.verify(A)


def test_nothing_is_visible_before_it_is_published_or_when_it_is_not(store: ArtifactStore) -> None:
    """BR-143: partial files are invisible."""
    with store.stage() as staged:
        fill(staged, FILES)
        assert not store.contains(A)
        assert store.list() == ()
        with pytest.raises(ArtifactNotFound):
            store.open(A)
    assert not staged.exists()


def test_the_first_of_two_publications_stays(store: ArtifactStore) -> None:
    assert publish(store)
    assert not publish(store, files=FILES | {"engine.bin": b"another build of the same key"})
    assert contents(store) == FILES


def test_simultaneous_writers_of_one_key_leave_one_whole_artifact(backend: Backend) -> None:
    """No two builds give the same bytes: what is left is one writer's, not a mixture."""
    stores = [backend.open() for _ in range(4)]
    builds = [{name: content + bytes([n]) * 1000 for name, content in FILES.items()} for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: publish(stores[n % 4], files=builds[n]), range(8)))
    assert made.count(True) == 1
    assert contents(backend.open()) == builds[made.index(True)]
    assert len(backend.open().list()) == 1


def test_a_damaged_artifact_is_replaced_by_the_next_publication(backend: Backend) -> None:
    store = backend.open()
    publish(store)
    for name in (*FILES, "manifest.json"):
        backend.damage(A, name, lambda content: content[:-1] + b"!" if content else b"!")
        with pytest.raises(ArtifactCorrupt):
            backend.open().open(A)
        assert publish(store), "compiling again repairs it"
        assert contents(backend.open()) == FILES


def refused(store: ArtifactStore, files: dict[str, bytes], manifest_bytes: bytes, artifact_id: str = A) -> None:
    with store.stage() as staged:
        fill(staged, files)
        with pytest.raises(ArtifactCorrupt):
            store.publish(artifact_id, staged, manifest_bytes)
    assert store.list() == ()
    assert not store.contains(A)


def test_a_manifest_that_does_not_describe_the_files_is_refused(store: ArtifactStore) -> None:
    """Missing, extra, shorter, longer, changed and reordered files."""
    with store.stage() as staged:
        fill(staged, FILES)
        entries = describe_files(staged)
    manifest = manifest_of(A, entries)
    first, *others = FILES
    refused(store, {name: FILES[name] for name in others}, manifest)
    refused(store, FILES | {"extra": b"x"}, manifest)
    refused(store, FILES | {first: FILES[first][:-1]}, manifest)
    refused(store, FILES | {first: FILES[first] + b"x"}, manifest)
    refused(store, FILES | {first: FILES[first][:-1] + b"x"}, manifest)
    digests = [(entry.sha256, entry.size) for entry in entries]
    rotated = tuple(replace(e, sha256=d, size=s) for e, (d, s) in zip(entries, digests[1:] + digests[:1], strict=True))
    refused(store, FILES, manifest_of(A, rotated))


def test_a_manifest_of_another_artifact_or_of_nothing_is_refused(store: ArtifactStore) -> None:
    with store.stage() as staged:
        fill(staged, FILES)
        entries = describe_files(staged)
    refused(store, FILES, manifest_of(B, entries))
    refused(store, FILES, b"not json")
    refused(store, FILES, b"[]")
    refused(store, FILES, b'{"artifact_id":"' + A.encode() + b'","kind":"model"}')
    refused(store, FILES, manifest_of(A, (*entries, entries[0])))


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/x", "a/../x", "a//b", "./a", "a/.", "a\\b", "a\0b", "", "a b", "é", "x" * 256, "manifest.json", "manifest.sig"],
)
def test_names_that_lead_elsewhere_are_refused(store: ArtifactStore, name: str) -> None:
    with store.stage() as staged:
        fill(staged, FILES)
        entries = describe_files(staged)
    refused(store, FILES, manifest_of(A, (replace(entries[0], path=name), *entries[1:])))


def test_links_are_refused(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    for link, target in (("link", tmp_path / "secret"), ("folder", tmp_path)):
        with store.stage() as staged:
            fill(staged, FILES)
            entries = describe_files(staged)
            (staged / link).symlink_to(target)
            with pytest.raises(ArtifactCorrupt, match="link"):
                describe_files(staged)
            with pytest.raises(ArtifactCorrupt, match="link"):
                store.publish(A, staged, manifest_of(A, entries))
    assert not store.contains(A)


def test_special_files_are_refused(store: ArtifactStore) -> None:
    with store.stage() as staged:
        os.mkfifo(staged / "pipe")
        with pytest.raises(ArtifactCorrupt, match="special"):
            store.publish(A, staged, manifest_of(A, ()))


@pytest.mark.parametrize(
    "bad", ["", "../" + "a" * 61, "A" * 64, "a" * 63, "a" * 65, "a" * 63 + "\n", "/" * 64, "a" * 32 + "/" + "a" * 31]
)
def test_malformed_ids_are_refused_everywhere(store: ArtifactStore, bad: str) -> None:
    with store.stage() as staged:
        for act in (
            lambda: store.publish(bad, staged, manifest_of(A, ())),
            lambda: store.open(bad),
            lambda: store.verify(bad),
            lambda: store.manifest(bad),
            lambda: store.contains(bad),
            lambda: store.add_signature(bad, b""),
            lambda: store.delete(bad),
        ):
            with pytest.raises(FieldOutOfRange):
                act()


def test_listing_by_kind_oldest_first(backend: Backend) -> None:
    store = backend.open()
    publish(store, B)
    publish(store, A, model_id=B)
    publish(store, C)
    infos = {info.artifact_id: info for info in store.list()}
    assert infos.keys() == {A, B, C}
    assert [info.published_s for info in store.list()] == sorted(info.published_s for info in store.list())
    assert [info.artifact_id for info in store.list("engine")] == [A]
    assert (infos[A].kind, infos[A].model_id, infos[B].kind, infos[B].model_id) == ("engine", B, "model", None)
    assert infos[A].size_bytes >= sum(len(content) for content in FILES.values())
    assert store.list("no such kind") == ()


def test_a_missing_artifact_is_said_to_be_missing(store: ArtifactStore) -> None:
    assert not store.contains(A)
    for act in (store.open, store.verify, store.manifest, store.delete, lambda i: store.add_signature(i, b"")):
        with pytest.raises(ArtifactNotFound):
            act(A)
    assert store.list() == ()


def test_an_artifact_may_hold_no_file_at_all(store: ArtifactStore) -> None:
    assert publish(store, files={})
    assert contents(store) == {}
