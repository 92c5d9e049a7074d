"""The library cache: what the key covers, when a build happens, and what a reader can ever see."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import shutil
from pathlib import Path

import pytest

from shared.errors import BuildFailed
from shared.kernels import build

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler on this host")
SOURCE = 'extern "C" int quire_test_answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_loaded", {})
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def load_in_child(source: Path, results: multiprocessing.SimpleQueue[str]) -> None:
    results.put(str(build.load_library("answer", [source])))


@needs_compiler
def test_built_once_then_found(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.load_library("answer", [source])
    assert library is not None
    assert ctypes.CDLL(str(library)).quire_test_answer() == 42
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    monkeypatch.setattr(build, "_loaded", {})  # as another process would
    assert build.load_library("answer", [source]) == library


@needs_compiler
def test_a_source_edited_under_a_live_process_is_loaded_by_the_next_one(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two libraries that register one operator would end the process."""
    library = build.load_library("answer", [source])
    source.write_text(SOURCE.replace("42", "43"))
    assert build.load_library("answer", [source]) == library
    monkeypatch.setattr(build, "_loaded", {})
    assert build.load_library("answer", [source]) != library


@needs_compiler
def test_processes_racing_for_one_library_all_get_it(source: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    children = [context.Process(target=load_in_child, args=(source, results)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=120)
    paths = {results.get() for _ in children}
    assert len(paths) == 1
    assert sorted(entry.name for entry in Path(paths.pop()).parent.iterdir()) == ["answer.so", "lock"]


@needs_compiler
def test_rejected_source_raises_and_publishes_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text("this is not C++\n")
    with pytest.raises(BuildFailed, match="rejected kernel library answer"):
        build.load_library("answer", [source])
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_no_compiler_is_none_with_the_reason(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert build.load_library("answer", [source]) is None
    assert "no C++ compiler" in caplog.text


def test_unusable_cache_is_none_with_the_reason(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(build, "find_compiler", lambda: shutil.which("true"))
    with caplog.at_level(logging.WARNING):
        assert build.load_library("answer", [source]) is None
    assert "QUIRE_CACHE" in caplog.text


@pytest.mark.parametrize("part", ["name", "source", "flags", "torch", "cpu", "machine"])
def test_digest_covers_every_input(part: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("true") or "true"
    before = build.library_digest("a", [source], ("-O3",), compiler)
    name, flags = "a", ("-O3",)
    match part:
        case "name":
            name = "b"
        case "source":
            source.write_text(SOURCE + " ")
        case "flags":
            flags = ("-O2",)
        case "torch":
            monkeypatch.setattr(build.torch, "__version__", "0.0.0")
        case "cpu":
            monkeypatch.setattr(build, "_cpu_flags", lambda: "sse2")
        case "machine":
            monkeypatch.setattr(build.platform, "machine", lambda: "other")
    assert build.library_digest(name, [source], flags, compiler) != before


def test_digest_covers_the_compiler(source: Path) -> None:
    true, echo = shutil.which("true") or "true", shutil.which("cat") or "cat"
    assert build.library_digest("a", [source], (), true) != build.library_digest("a", [source], (), echo)
