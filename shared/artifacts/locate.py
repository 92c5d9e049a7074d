"""From the settings an operator writes to an open artifact store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from shared.artifacts.local import LocalStore
from shared.artifacts.store import ArtifactStore, ManifestVerifier
from shared.errors import BackendUnavailable, FieldOutOfRange

_RETRIES = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A store as settings name it. `place` is `s3://bucket/prefix` or a directory; `cache` is the directory that holds at most
    `cache_bytes` of a bucket's artifacts, beside those that are open."""

    place: str
    cache: str
    cache_bytes: int


def open_store(location: StoreLocation, *, trusted_keys: Sequence[Path] = ()) -> ArtifactStore:
    """The store at `location`.

    Credentials, region and endpoint of a bucket come from the usual AWS_ variables. `trusted_keys` are PEM files of Ed25519
    public keys: with any, artifacts without a signature by one of them are not opened. StoreUnavailable, FieldOutOfRange for a
    bad key file or another kind of URL, BackendUnavailable where the extra `s3` or `signing` is not installed.
    """
    verifier = _verifier(trusted_keys)
    scheme, is_url, _ = location.place.partition("://")
    if not is_url:
        return LocalStore(Path(location.place), verifier=verifier)
    unknown = FieldOutOfRange(f"store must be s3://bucket/prefix or a directory; got {location.place[:200]!r}", field="store")
    if scheme != "s3":
        raise unknown
    try:
        from obstore.exceptions import GenericError
        from obstore.store import S3Store  # an extra: one host needs no bucket

        from shared.artifacts.bucket import Bucket
        from shared.artifacts.host_cache import HostCache
        from shared.artifacts.object import ObjectStore
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"an s3:// store needs the extra 's3' (pip install 'quire[s3]'): {error}") from error
    try:
        bucket = Bucket(S3Store.from_url(location.place, retry_config=_RETRIES))
    except GenericError as error:
        raise unknown from error
    return ObjectStore(bucket, HostCache(LocalStore(Path(location.cache)), location.cache_bytes), verifier=verifier)


def _verifier(trusted_keys: Sequence[Path]) -> ManifestVerifier | None:
    if not trusted_keys:
        return None
    try:
        from shared.artifacts.signing import TrustedKeys, load_public_key  # an extra: most stores are private
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"signatures need the extra 'signing' (pip install 'quire[signing]'): {error}") from error
    return TrustedKeys([load_public_key(path) for path in trusted_keys])
