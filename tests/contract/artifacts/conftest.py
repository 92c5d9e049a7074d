from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.artifacts.store import ArtifactStore
from tests.support.artifact_stores import Backend, LocalBackend, S3Backend, s3_server


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def local(tmp_path: Path) -> LocalBackend:
    return LocalBackend(tmp_path / "store")


@pytest.fixture
def s3(s3_url: str, tmp_path: Path) -> S3Backend:
    return S3Backend(s3_url, uuid.uuid4().hex, tmp_path / "caches")


@pytest.fixture(params=["local", "s3"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """The suite runs once on each."""
    made: Backend = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def store(backend: Backend) -> ArtifactStore:
    return backend.open()
