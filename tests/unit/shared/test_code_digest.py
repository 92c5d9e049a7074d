"""The digest of our own code changes with every file that makes it, and with nothing else."""

import pytest

from shared import code_digest as module
from shared.code_digest import code_digest


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "x.py").write_text("1")
    (tmp_path / "a" / "deep" / "k.cpp").write_text("2")
    (tmp_path / "a" / "notes.txt").write_text("3")
    (tmp_path / "b.py").write_text("4")
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["a/x.py", "a/deep/k.cpp", "b.py"])
def test_a_source_file_counts(root, name):
    before = code_digest(["a", "b.py"])
    assert code_digest(["a", "b.py"]) == before
    (root / name).write_text("changed")
    assert code_digest(["a", "b.py"]) != before


def test_a_name_counts(root):
    before = code_digest(["a"])
    (root / "a" / "x.py").rename(root / "a" / "y.py")
    assert code_digest(["a"]) != before


def test_other_files_do_not_count(root):
    before = code_digest(["a"])
    (root / "a" / "notes.txt").write_text("changed")
    (root / "a" / "x.pyc").write_text("compiled")
    assert code_digest(["a"]) == before


def test_a_place_without_code_is_a_mistake(root):
    with pytest.raises(ValueError, match="no source files"):
        code_digest(["c"])
