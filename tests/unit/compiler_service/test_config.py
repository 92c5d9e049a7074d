"""Settings come from the environment, and bad ones are refused by name."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from compiler_service.config import CompilerSettings
from shared.artifacts.locate import StoreLocation


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)


def test_everything_has_a_default():
    settings = CompilerSettings()
    assert settings.server_options.address == "127.0.0.1:50061"
    assert settings.model_roots == (Path.home(), Path.cwd())
    assert settings.build_slots == 1


def test_model_roots_are_a_list_as_in_path(monkeypatch):
    monkeypatch.setenv("QUIRE_COMPILER_MODEL_ROOTS", f"/models{os.pathsep}/more")
    assert CompilerSettings().model_roots == (Path("/models"), Path("/more"))


def test_what_a_service_keeps_lies_under_its_data_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_DATA", str(tmp_path))
    settings = CompilerSettings()
    store = settings.store_location
    kept = (settings.queue_location, settings.digest_cache_file, settings.build_directory, store.place, store.cache)
    assert all(Path(path).is_relative_to(tmp_path) for path in kept)
    assert len({str(path) for path in kept}) == 5


def test_queue_and_store_may_be_elsewhere(monkeypatch, tmp_path):
    for name, value in {"REDIS_URL": "redis://redis:6379/0", "STORE": "s3://bucket/prefix", "STORE_CACHE_BYTES": "1000"}.items():
        monkeypatch.setenv(f"QUIRE_COMPILER_{name}", value)
    settings = CompilerSettings(data=tmp_path)
    assert settings.queue_location == "redis://redis:6379/0"
    assert settings.store_location == StoreLocation("s3://bucket/prefix", str(tmp_path / "artifact-cache"), 1000)
    monkeypatch.setenv("QUIRE_COMPILER_STORE", "artifacts")
    assert CompilerSettings().store_location.place == str(Path.cwd() / "artifacts")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BUILD_SLOTS", "0"),
        ("BUILD_SLOTS", "many"),
        ("EXPLAIN_TIMEOUT_S", "0"),
        ("RECLAIM_EVERY_S", "-1"),
        ("MAX_EXPLAINS", "0"),
        ("REDIS_URL", "/a/path"),
    ],
)
def test_bad_values(monkeypatch, name, value):
    monkeypatch.setenv(f"QUIRE_COMPILER_{name}", value)
    with pytest.raises(ValidationError, match=name.lower()):
        CompilerSettings()
