"""What tests of the artifact store share: both stores on a clock that can be moved on, ways to damage them, a private S3 server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import boto3
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

from shared.artifacts.bucket import Bucket
from shared.artifacts.files import describe_files
from shared.artifacts.host_cache import HostCache
from shared.artifacts.local import LocalStore
from shared.artifacts.object import ObjectStore
from shared.artifacts.placement import Placed
from shared.artifacts.record import MANIFEST_NAME
from shared.artifacts.store import ArtifactStore, ManifestVerifier
from shared.manifest import FileEntry, canonical_json

A, B, C, D = ("a" * 64, "b" * 64, "c" * 64, "d" * 64)
BUCKET = "quire-test"
FILES = {"engine.bin": b"\x7fELF" + bytes(range(256)) * 8, "tokenizer/vocab.json": b'{"a":0}', "empty": b""}


@dataclass
class MovableClock:
    ahead_s: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s

    def advance(self, seconds: float) -> None:
        self.ahead_s += seconds


def manifest_of(artifact_id: str, files: tuple[FileEntry, ...], *, kind: str = "model", model_id: str | None = None) -> bytes:
    fields = {"artifact_id": artifact_id, "kind": kind, "files": [asdict(entry) for entry in files]}
    return canonical_json(fields | ({"model": {"model_id": model_id}} if model_id else {}))


def fill(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def publish(store: ArtifactStore, artifact_id: str = A, files: Mapping[str, bytes] = FILES, *, model_id: str | None = None) -> bool:
    with store.stage() as staged:
        fill(staged, files)
        kind = "engine" if model_id else "model"
        return store.publish(artifact_id, staged, manifest_of(artifact_id, describe_files(staged), kind=kind, model_id=model_id))


def contents(store: ArtifactStore, artifact_id: str = A) -> dict[str, bytes]:
    with store.open(artifact_id) as handle:
        return {name: path.read_bytes() for name, path in handle.paths.items()}


Damage = Callable[[bytes], bytes | None]


class Backend(Protocol):
    """A storage; every `open` is what another process or host would see."""

    clock: MovableClock

    def open(self, verifier: ManifestVerifier | None = None) -> ArtifactStore: ...

    def damage(self, artifact_id: str, name: str, change: Damage) -> None:
        """Replace the stored bytes of one file by what `change` makes of them; None removes them."""
        ...

    def stored_bytes(self) -> int:
        """Bytes of everything stored."""
        ...


@dataclass
class LocalBackend:
    root: Path
    clock: MovableClock = field(default_factory=MovableClock)

    def open(self, verifier: ManifestVerifier | None = None) -> LocalStore:
        return LocalStore(self.root, verifier=verifier, clock=self.clock)

    def directory(self, artifact_id: str) -> Path:
        return self.root / artifact_id[:2] / artifact_id

    def damage(self, artifact_id: str, name: str, change: Damage) -> None:
        path = self.directory(artifact_id) / name
        changed = change(path.read_bytes())
        if changed is None:
            path.unlink()
        else:
            path.write_bytes(changed)

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())


@dataclass
class S3Backend:
    """Every host has a cache of its own under `caches`."""

    url: str
    prefix: str
    caches: Path
    clock: MovableClock = field(default_factory=MovableClock)
    cache_bytes: int = 64 << 30

    def __post_init__(self) -> None:
        self.bucket = Bucket(s3_store(self.url, self.prefix))

    def open(self, verifier: ManifestVerifier | None = None) -> ObjectStore:
        cache = self.caches / str(len(list(self.caches.iterdir())) if self.caches.exists() else 0)
        host = HostCache(LocalStore(cache, clock=self.clock), self.cache_bytes)
        return ObjectStore(self.bucket, host, verifier=verifier, clock=self.clock)

    def damage(self, artifact_id: str, name: str, change: Damage) -> None:
        path = f"{artifact_id}/{name}"
        if name != MANIFEST_NAME:
            placed = Placed.read(self.read(f"{artifact_id}/{MANIFEST_NAME}"), artifact_id)
            (path,) = (placed.path(entry) for entry in placed.head.files if entry.path == name)
        changed = change(self.read(path))
        if changed is None:
            self.bucket.delete([path])
        else:
            self.bucket.put(path, changed)

    def read(self, path: str) -> bytes:
        content = self.bucket.get(path)
        assert content is not None
        return content

    def stored_bytes(self) -> int:
        return sum(item.size for item in self.bucket.items())


def s3_store(url: str, prefix: str) -> S3Store:
    return S3Store.from_url(
        f"s3://{BUCKET}/{prefix}",
        endpoint=url,
        access_key_id="test",
        secret_access_key="test",
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


def s3_environment(url: str) -> dict[str, str]:
    """What makes `s3://BUCKET/...` the bucket of the server at `url`, for this process or one it starts."""
    names = ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION", "ALLOW_HTTP")
    return {f"AWS_{name}": value for name, value in zip(names, (url, "test", "test", "us-east-1", "true"), strict=True)}


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a real HTTP server that speaks S3, on a free port of the loopback, with one empty bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket=BUCKET)
    yield url
    server.stop()
