"""Digests follow content; the cache follows what the file system says."""

import os
import time

import pytest

from compiler_service.ingest import digest
from compiler_service.ingest.digest import DigestCache, check_unchanged, fingerprint, hash_files
from shared.errors import SourceInvalid


@pytest.fixture
def files(tmp_path):
    made = [tmp_path / "a", tmp_path / "b"]
    for path in made:
        path.write_bytes(path.name.encode() * 100)
    return made


def test_content_name_and_border_count(tmp_path, files):
    first = hash_files(files)
    assert hash_files(files) == first
    assert hash_files(files[::-1]) != first
    files[0].write_bytes(b"a" * 101)
    files[1].write_bytes(b"b" * 99)
    assert hash_files(files) != first
    renamed = files[0].rename(tmp_path / "c")
    assert hash_files([renamed]) != hash_files([files[1]])


def test_unchanged_files_are_not_read_again(tmp_path, files, monkeypatch):
    first = DigestCache(tmp_path / "cache.json").digest(files)
    monkeypatch.setattr(digest, "hash_files", lambda files: pytest.fail("read again"))
    assert DigestCache(tmp_path / "cache.json").digest(files) == first


@pytest.mark.parametrize("change", ["content", "time", "inode"])
def test_a_change_is_noticed(tmp_path, files, change):
    cache = DigestCache(tmp_path / "cache.json")
    before, mark = cache.digest(files), fingerprint(files)
    if change == "content":
        files[0].write_bytes(b"x" * 100)
    elif change == "time":
        os.utime(files[0], ns=(1, 1))
    else:
        times = files[0].stat()
        copy = tmp_path / "copy"
        copy.write_bytes(b"z" * 100)
        os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
        copy.rename(files[0])
    assert fingerprint(files) != mark
    assert (cache.digest(files) == before) == (change == "time")
    with pytest.raises(SourceInvalid):
        check_unchanged(files, mark)


def test_other_weights_of_the_same_size_in_the_same_file_are_noticed_whatever_its_time_says(tmp_path, files):
    """As `cp -p` and `tar` write them."""
    cache = DigestCache(tmp_path / "cache.json")
    before, times = cache.digest(files), files[0].stat()
    time.sleep(0.02)  # longer than a tick of the file system's clock
    files[0].write_bytes(b"z" * times.st_size)
    os.utime(files[0], ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache.digest(files) == hash_files(files) != before


def test_a_file_that_is_gone_is_the_sources_fault(files):
    mark = fingerprint(files)
    files[1].unlink()
    for ask in (fingerprint, hash_files, lambda files: check_unchanged(files, mark)):
        with pytest.raises(SourceInvalid, match="still being written"):
            ask(files)


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, files):
    (tmp_path / "file").write_bytes(b"")
    cache = DigestCache(tmp_path / "file" / "cache.json")
    assert cache.digest(files) == hash_files(files)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_cache_only_costs_time(tmp_path, files, content):
    (tmp_path / "cache.json").write_bytes(content)
    cache = DigestCache(tmp_path / "cache.json")
    assert cache.digest(files) == hash_files(files)
    assert cache.digest(files) == hash_files(files)


def test_the_cache_stays_small(tmp_path, files, monkeypatch):
    monkeypatch.setattr(digest, "_REMEMBERED", 3)
    cache = DigestCache(tmp_path / "cache.json")
    for size in range(1, 8):
        files[0].write_bytes(b"x" * size)
        cache.digest(files)
    assert len(cache._load()) == 3
