"""Every damaged byte is found before anything is loaded, as a typed error that names the file."""

from __future__ import annotations

from functools import partial
from itertools import chain, combinations
from pathlib import Path

import pytest

from shared.artifacts.files import describe_files
from shared.artifacts.local import LocalStore
from shared.artifacts.record import MANIFEST_NAME, seal
from shared.artifacts.store import UNREADABLE, ArtifactStore
from shared.errors import ArtifactCorrupt, ArtifactNotFound
from tests.support.artifact_stores import FILES, A, B, Backend, Damage, contents, fill, manifest_of, publish


def flip(position: int) -> Damage:
    return lambda content: content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


DAMAGES: dict[str, Damage] = {
    "first byte": flip(0),
    "middle byte": lambda content: flip(len(content) // 2)(content),
    "last byte": lambda content: flip(len(content) - 1)(content),
    "one byte short": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "one byte more": lambda content: content + b"\0",
    "emptied": lambda _: b"",
    "zeroed": lambda content: bytes(len(content)),
}


def assert_refused(store: ArtifactStore, file: str) -> None:
    """Nothing is handed out, the error names the file, and no lease stays behind."""
    for read in (store.open, store.verify):
        with pytest.raises(ArtifactCorrupt) as caught:
            read(A)
        assert caught.value.details["file"] == file
    assert not any(info.in_use for info in store.list())


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("file", ["engine.bin", "tokenizer/vocab.json", MANIFEST_NAME])
def test_a_damaged_file_is_never_loaded(backend: Backend, file: str, damage: Damage) -> None:
    """BR-143: truncation and flips are typed errors, not a crash of the loader."""
    publish(backend.open())
    backend.damage(A, file, damage)
    assert_refused(backend.open(), file)


def test_every_byte_of_a_file_and_every_length_counts(backend: Backend) -> None:
    """One flip a byte (to a digest all changes are alike), and every truncation."""
    store, content = backend.open(), FILES["engine.bin"][:64]
    publish(store, files={"engine.bin": content})
    step = 1 if isinstance(store, LocalStore) else 13  # every one where it is cheap
    damages = [flip(position) for position in range(0, len(content), step)]
    damages += [partial(cut, length) for length in range(0, len(content), step)]
    for damage in damages:
        backend.damage(A, "engine.bin", damage)
        with pytest.raises(ArtifactCorrupt) as caught:
            store.verify(A)
        assert caught.value.details["file"] == "engine.bin"
        backend.damage(A, "engine.bin", lambda _: content)
    assert contents(store) == {"engine.bin": content}


def cut(length: int, content: bytes) -> bytes:
    return content[:length]


def test_whatever_part_of_a_publication_is_there_it_is_whole_or_refused(backend: Backend) -> None:
    """Every set of objects that a publication in some other order could have left, a reader that comes then included."""
    names = [*FILES, MANIFEST_NAME]  # a file is found through the manifest: that goes last
    for number, missing in enumerate(chain.from_iterable(combinations(names, size) for size in range(len(names) + 1))):
        artifact_id = f"{number:064x}"
        publish(backend.open(), artifact_id)
        for name in missing:
            backend.damage(artifact_id, name, lambda _: None)
        if not missing:
            assert contents(backend.open(), artifact_id) == FILES
            continue
        expected = ArtifactNotFound if MANIFEST_NAME in missing else ArtifactCorrupt
        with pytest.raises(expected) as caught:
            backend.open().open(artifact_id)
        assert expected is ArtifactNotFound or caught.value.details["file"] in missing


def test_a_file_that_should_be_empty_is_checked_too(backend: Backend) -> None:
    publish(backend.open())
    backend.damage(A, "empty", lambda _: b"x")
    assert_refused(backend.open(), "empty")


def stored(backend: Backend, artifact_id: str = A) -> bytes:
    """The manifest as it is kept."""
    seen: list[bytes] = []

    def look(content: bytes) -> bytes:
        seen.append(content)
        return content

    backend.damage(artifact_id, MANIFEST_NAME, look)
    return seen[0]


def test_every_single_byte_of_the_manifest_counts(backend: Backend) -> None:
    store = backend.open()
    publish(store, files={"f": b"x"})
    original = stored(backend)
    step = 1 if isinstance(store, LocalStore) else 23  # every byte where it is cheap
    for position in range(0, len(original), step):
        backend.damage(A, MANIFEST_NAME, flip(position))
        with pytest.raises(ArtifactCorrupt):
            store.manifest(A)
        backend.damage(A, MANIFEST_NAME, lambda _: original)
    assert contents(store) == {"f": b"x"}


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(backend: Backend, file: str) -> None:
    """BR-146: the folder exists, one of its files does not."""
    publish(backend.open())
    backend.damage(A, file, lambda _: None)
    assert_refused(backend.open(), file)


def test_an_artifact_without_manifest_is_not_there(backend: Backend) -> None:
    publish(backend.open())
    backend.damage(A, MANIFEST_NAME, lambda _: None)
    store = backend.open()
    with pytest.raises(ArtifactNotFound):
        store.open(A)
    assert store.list() == ()
    assert publish(store), "and can be published again"
    assert contents(store) == FILES


def test_a_manifest_of_another_artifact_is_not_believed(backend: Backend) -> None:
    """Whole, sealed, and somebody else's."""
    store = backend.open()
    publish(store, A)
    publish(store, B, files={"engine.bin": b"b"})
    other = stored(backend, B)
    backend.damage(A, MANIFEST_NAME, lambda _: other)
    with pytest.raises(ArtifactCorrupt, match="belongs to"):
        store.open(A)


def test_the_manifest_of_another_build_is_not_believed(backend: Backend, tmp_path: Path) -> None:
    """Right id, right seal, other files: what a publication in the wrong order would leave."""
    store = backend.open()
    publish(store)
    (tmp_path / "other").mkdir()
    fill(tmp_path / "other", FILES | {"engine.bin": FILES["engine.bin"][::-1]})
    own, other = store.manifest(A), manifest_of(A, describe_files(tmp_path / "other"))
    backend.damage(A, MANIFEST_NAME, lambda content: content.replace(seal(own), seal(other)))
    with pytest.raises(ArtifactCorrupt):
        store.open(A)


def test_files_that_changed_places_are_found(backend: Backend) -> None:
    """Same size, each other's content."""
    publish(backend.open(), files={"one": b"1" * 100, "two": b"2" * 100})
    backend.damage(A, "one", lambda _: b"2" * 100)
    backend.damage(A, "two", lambda _: b"1" * 100)
    with pytest.raises(ArtifactCorrupt):
        backend.open().open(A)


def test_a_damaged_artifact_does_not_hide_the_others_and_can_be_deleted(backend: Backend) -> None:
    store = backend.open()
    publish(store, A)
    publish(store, B)
    backend.damage(A, MANIFEST_NAME, DAMAGES["half"])
    assert {info.artifact_id: info.kind for info in store.list()} == {A: UNREADABLE, B: "model"}
    assert [info.artifact_id for info in store.list("model")] == [B]
    store.delete(A)
    assert [info.artifact_id for info in store.list()] == [B]
