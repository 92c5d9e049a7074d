"""From the settings an operator writes to an open artifact store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from shared.artifacts.local import LocalStore
from shared.artifacts.store import ArtifactStore, ManifestVerifier
from shared.errors import BackendUnavailable

_RETRIES = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}


def open_store(location: str, *, cache: Path, trusted_keys: Sequence[Path] = ()) -> ArtifactStore:
    """The store in the bucket of `s3://bucket/prefix`, with its cache in the directory `cache`; else in the directory `location`.

    Credentials, region and endpoint of a bucket come from the usual AWS_ variables. `trusted_keys` are PEM files of Ed25519
    public keys: with any, artifacts without a signature by one of them are not opened. StoreUnavailable, FieldOutOfRange for a
    bad key file, BackendUnavailable where the extra `s3` or `signing` is not installed.
    """
    verifier = _verifier(trusted_keys)
    if not location.startswith("s3://"):
        return LocalStore(Path(location), verifier=verifier)
    try:
        from obstore.store import S3Store  # an extra: one host needs no bucket

        from shared.artifacts.bucket import Bucket
        from shared.artifacts.object import ObjectStore
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"an s3:// store needs the extra 's3' (pip install 'quire[s3]'): {error}") from error
    bucket = Bucket(S3Store.from_url(location, retry_config=_RETRIES))
    return ObjectStore(bucket, LocalStore(cache), verifier=verifier)


def _verifier(trusted_keys: Sequence[Path]) -> ManifestVerifier | None:
    if not trusted_keys:
        return None
    try:
        from shared.artifacts.signing import TrustedKeys, load_public_key  # an extra: most stores are private
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"signatures need the extra 'signing' (pip install 'quire[signing]'): {error}") from error
    return TrustedKeys([load_public_key(path) for path in trusted_keys])
