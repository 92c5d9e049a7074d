"""A small file is replaced whole or not at all, and a disk that fails is left as it was."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shared.small_file import replace_file


def test_it_is_made_with_its_directory_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "made" / "list.json"
    for content in (b"one", b"two"):
        replace_file(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_one_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "list.json"
    replace_file(path, b"one")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        replace_file(path, b"two")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]
