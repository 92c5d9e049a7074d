"""What only a directory can do wrong: links, strangers' files, dying writers, failing removals, several processes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.artifacts import local as local_module
from shared.artifacts.bucket import Bucket
from shared.artifacts.files import make_durable
from shared.artifacts.lease import LEASE_TTL_S
from shared.artifacts.local import LocalStore
from shared.artifacts.locate import StoreLocation, open_store
from shared.artifacts.object import ObjectStore
from shared.artifacts.record import MANIFEST_NAME
from shared.artifacts.staging import STALE_STAGING_S, Staging
from shared.errors import ArtifactCorrupt, StoreUnavailable
from tests.support.artifact_stores import FILES, A, B, Backend, LocalBackend, contents, fill, manifest_of, publish

WRITER = """
import sys
from dataclasses import asdict
from pathlib import Path
from shared.artifacts.files import describe_files
from shared.artifacts.local import LocalStore
from shared.manifest import canonical_json
store = LocalStore(Path(sys.argv[1]))
print("ready", flush=True)
number = 0
while True:
    artifact_id = f"{number:064x}"
    with store.stage() as staged:
        for name in ("one", "two"):
            (staged / name).write_bytes(bytes([number % 251]) * 50_000)
        files = [asdict(entry) for entry in describe_files(staged)]
        manifest = canonical_json({"artifact_id": artifact_id, "kind": "model", "files": files})
        store.publish(artifact_id, staged, manifest)
    print(artifact_id, flush=True)
    number += 1
"""
HOLDER = """
import sys, time
from pathlib import Path
from shared.artifacts.local import LocalStore
handle = LocalStore(Path(sys.argv[1])).open(sys.argv[2])
print("ready", flush=True)
time.sleep(600)
"""
HELD_WRITER = """
import sys, time
from pathlib import Path
from shared.artifacts.local import LocalStore
with LocalStore(Path(sys.argv[1])).stage() as staged:
    (staged / "weights").write_bytes(bytes(50_000))
    print("ready", flush=True)
    time.sleep(600)
"""


@contextmanager
def process(script: str, *arguments: str) -> Iterator[None]:
    """Running `script`, once it has said that it is where it wants to be; killed at the end."""
    with subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "ready\n"
            yield
        finally:
            running.kill()


def test_a_link_in_place_of_a_file_or_folder_is_refused(local: LocalBackend, tmp_path: Path) -> None:
    """The same bytes behind a link are not the artifact's."""
    store = local.open()
    publish(store)
    shutil.copytree(local.directory(A), tmp_path / "elsewhere")
    for name in ("engine.bin", "tokenizer", MANIFEST_NAME):
        path = local.directory(A) / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.symlink_to(tmp_path / "elsewhere" / name)
        with pytest.raises(ArtifactCorrupt):
            store.open(A)
        path.unlink()
        source = tmp_path / "elsewhere" / name
        shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)
        assert contents(store) == FILES


def test_a_link_in_place_of_a_whole_artifact_is_refused(local: LocalBackend, tmp_path: Path) -> None:
    publish(local.open())
    for directory, name in ((local.directory(A), "artifact"), (local.directory(A).parent, "shard")):
        directory.rename(tmp_path / name)
        directory.symlink_to(tmp_path / name)
        with pytest.raises(ArtifactCorrupt, match="link"):
            local.open().open(A)
        directory.unlink()
        (tmp_path / name).rename(directory)
    assert contents(local.open()) == FILES


def test_a_file_nobody_listed_is_refused(local: LocalBackend) -> None:
    """BR-146: a forgotten .incomplete file means that somebody wrote here."""
    publish(local.open())
    (local.directory(A) / "engine.bin.incomplete").write_bytes(b"")
    with pytest.raises(ArtifactCorrupt, match=r"engine\.bin\.incomplete"):
        local.open().open(A)


def test_only_a_staged_directory_of_this_store_is_published(local: LocalBackend, tmp_path: Path) -> None:
    store = local.open()
    with LocalStore(tmp_path / "other").stage() as foreign:
        for directory in (tmp_path, foreign, local.root / "staging", local.root / "staging" / "x" / "y"):
            with pytest.raises(ValueError, match="stage"):
                store.publish(A, directory, manifest_of(A, ()))


def test_a_writer_killed_at_any_moment_leaves_only_whole_artifacts(local: LocalBackend) -> None:
    """BR-143, BR-144: each of six is killed a little later in its work; the next one finds what it left."""
    for kill in range(6):
        command = [sys.executable, "-c", WRITER, str(local.root)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(kill * 0.013)
        writer.kill()
        acknowledged = [line.strip() for line in writer.stdout if line.endswith("\n")]
        writer.wait()
        store = local.open()
        visible = {info.artifact_id for info in store.list("model")}
        assert visible >= set(acknowledged)
        assert store.list() == store.list("model"), "nothing unreadable"
        for artifact_id in visible:
            store.verify(artifact_id)
    local.open().gc()
    assert list((local.root / "staging").iterdir()) == []


def test_what_a_dead_writer_left_is_collected_but_not_what_is_being_written(local: LocalBackend) -> None:
    """Whatever the clocks say: a forward step makes nobody dead."""
    store = local.open()
    (local.root / "staging" / "stray").write_bytes(b"of somebody else")
    with store.stage() as live:
        dead = local.root / "staging" / "dead"
        fill(dead, FILES)
        fill(live, FILES)
        local.clock.advance(STALE_STAGING_S + 60)
        report = store.gc()
        assert not dead.exists()
        assert live.exists()
        assert report.freed_bytes == sum(map(len, FILES.values()))


def test_the_next_writer_has_the_room_of_one_that_was_killed(local: LocalBackend) -> None:
    """As a build is by the kernel when memory is short, attempt after attempt: its weights lay there for a day, each time."""
    store = local.open()
    with process(HELD_WRITER, str(local.root)):
        (staged,) = (local.root / "staging").iterdir()
        with store.stage():
            assert (staged / "weights").exists(), "its writer is alive"
    with store.stage() as next_one:
        assert list((local.root / "staging").iterdir()) == [next_one]
        assert list((local.root / "trash").iterdir()) == []


def test_a_writer_that_ends_while_it_is_looked_for_is_not_dead(local: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    local.open()
    staging, genuine = Staging(local.root / "staging", local.clock), fcntl.flock
    live = staging.begin()

    def flock(descriptor: int, operation: int) -> None:
        live.end()
        genuine(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert staging.abandoned() == []


def test_where_directories_cannot_be_locked_the_dead_are_known_by_their_age(
    local: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = fcntl.flock

    def flock(file: object, operation: int) -> None:
        if isinstance(file, int):  # a directory's descriptor; the store's own lock is a file object
            raise OSError(errno.EBADF, "not opened for writing")
        genuine(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    store = local.open()
    with store.stage() as live:
        dead = local.root / "staging" / "dead"
        fill(dead, FILES)
        for path in (dead, *dead.rglob("*")):
            os.utime(path, (0, 0))
        fill(live, FILES)
        os.utime(live, (0, 0))  # its files are new
        store.gc()
        assert (dead.exists(), live.exists()) == (False, True)


def test_bytes_that_could_not_be_removed_are_tried_again(local: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-150: quota of two, three stored, deletion fails once: the bytes are accounted for until they are gone."""
    store = local.open()
    for artifact_id in (A, B):
        publish(store, artifact_id, {"engine.bin": b"x" * 10_000})
        local.clock.advance(10)
    remove = shutil.rmtree

    def fail(path: Path, **_: object) -> None:
        raise PermissionError(13, "not now", str(path))

    monkeypatch.setattr(shutil, "rmtree", fail)
    report = store.gc(max_bytes=15_000)
    assert (report.removed, report.failed) == ((), (A,))
    assert report.left_bytes == local.stored_bytes() > 20_000
    assert not store.contains(A), "nobody opens it any more"
    monkeypatch.setattr(shutil, "rmtree", remove)
    report = store.gc()
    assert report.freed_bytes > 10_000
    assert report.left_bytes == local.stored_bytes() < 15_000


def test_an_engine_being_served_survives_its_removal(local: LocalBackend) -> None:
    """BR-149: mapped or open files stay readable even if everything goes wrong and the artifact is removed."""
    store = local.open()
    publish(store)
    with store.open(A) as handle, handle.path("engine.bin").open("rb") as file:
        store.discard(A)
        assert file.read() == FILES["engine.bin"]
    assert not store.contains(A)


def test_files_without_a_manifest_are_collected_and_strangers_are_not(local: LocalBackend) -> None:
    """BR-150: a record that went without its files."""
    store = local.open()
    publish(store)
    (local.directory(A) / MANIFEST_NAME).unlink()
    for stranger in ("ab/notes", "lost+found/file"):
        (local.root / stranger).mkdir(parents=True)
        (local.root / stranger / MANIFEST_NAME).write_bytes(b"{}")
    assert store.list() == ()
    assert store.gc().freed_bytes == sum(map(len, FILES.values()))
    assert not local.directory(A).exists()
    assert store.gc(max_bytes=0, max_age_s=0).freed_bytes == 0


def test_of_two_writers_that_saw_the_same_damage_one_replaces_it(local: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other's whole artifact may be open by then."""
    publish(local.open())
    local.damage(A, "engine.bin", lambda content: content[:-1])
    published: list[bool] = []

    def overtaken(directory: Path) -> None:
        monkeypatch.setattr(local_module, "make_durable", make_durable)
        published.append(publish(local.open()))
        make_durable(directory)

    monkeypatch.setattr(local_module, "make_durable", overtaken)
    published.append(publish(local.open()))
    assert published == [True, False]
    assert contents(local.open()) == FILES


def leases_held() -> set[threading.Thread]:
    """In this process, other tests' engines included."""
    return {thread for thread in threading.enumerate() if thread.name == "artifact-lease"}


def test_an_open_that_fails_at_its_end_holds_nothing(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    store = backend.open()
    publish(store)
    before = leases_held()

    def fail(*_: object) -> None:
        raise StoreUnavailable("the medium failed")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "_mark_used", fail)
        with pytest.raises(StoreUnavailable):
            store.open(A)
    put = Bucket.put
    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "put", lambda bucket, path, source: fail() if path.endswith("/used") else put(bucket, path, source))
        if isinstance(store, ObjectStore):
            with pytest.raises(StoreUnavailable):
                store.open(A)
    assert leases_held() <= before
    assert not store.list()[0].in_use


def test_a_lease_is_its_process_s_and_lapses_after_it(local: LocalBackend) -> None:
    """BR-149: a heartbeat that is late, or a clock set forward, removes nothing from under who lives."""
    publish(local.open())
    with process(HOLDER, str(local.root), A):
        local.clock.advance(3 * LEASE_TTL_S)
        assert local.open().gc(max_bytes=0).removed == ()
    assert local.open().gc(max_bytes=0).removed == (A,)


def test_a_dead_holder_s_lease_protects_for_its_time(local: LocalBackend) -> None:
    """Where nothing can be locked, it is all that there is."""
    publish(local.open())
    path = local.root / "leases" / A / "lease"
    path.parent.mkdir()
    path.touch()
    os.utime(path, (local.clock(),) * 2)
    local.clock.advance(LEASE_TTL_S - 5)
    assert local.open().gc(max_bytes=0).removed == ()
    local.clock.advance(10)
    assert local.open().gc(max_bytes=0).removed == (A,)


def test_leases_leave_nothing_behind(local: LocalBackend) -> None:
    store = local.open()
    publish(store)
    store.open(A).close()
    store.gc()
    assert list((local.root / "leases").iterdir()) == []


def test_a_medium_that_fails_is_a_typed_error(local: LocalBackend, tmp_path: Path) -> None:
    publish(local.open())
    store = local.open()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable):
        LocalStore(tmp_path / "file" / "store")
    shutil.rmtree(local.root / "leases")
    with pytest.raises(StoreUnavailable):
        store.open(A)


def test_a_path_is_a_local_store(tmp_path: Path) -> None:
    store = open_store(StoreLocation(str(tmp_path / "store"), "", 0))
    publish(store)
    assert contents(store) == FILES
    assert not (tmp_path / "cache").exists()
