"""Ed25519 signatures over manifests. An engine is native code: whoever configures keys loads only what their holders vouch for.

A manifest names its artifact and the digest of every file, so a signature over it covers every byte that is loaded. Stored form:

    ed25519 <key id, 16 hex digits> <signature, 128 hex digits>
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from shared.errors import ArtifactUntrusted, FieldOutOfRange

_PURPOSE = b"quire artifact manifest v1\0"
"""Signed in front of the manifest: a signature made for another purpose does not fit."""


def sign_manifest(key: Ed25519PrivateKey, manifest: bytes) -> bytes:
    return _encode(key_id(key.public_key()), key.sign(_PURPOSE + manifest))


def _encode(signer: str, value: bytes) -> bytes:
    return f"ed25519 {signer} {value.hex()}\n".encode()


class TrustedKeys:
    """A ManifestVerifier: any one of the keys must have signed. ValueError for no key at all, which would trust nothing."""

    def __init__(self, keys: Iterable[Ed25519PublicKey]) -> None:
        self._keys = {key_id(key): key for key in keys}
        if not self._keys:
            raise ValueError("at least one key is needed to verify signatures")

    def __call__(self, manifest: bytes, signature: bytes | None) -> None:
        """ArtifactUntrusted where the signature is missing, malformed, by an unknown key, or of other bytes."""
        if signature is None:
            raise self._refusal("it has no signature; sign it with `quire artifacts sign`")
        try:
            _, signer, text = signature.decode().split()
            value = bytes.fromhex(text)
        except ValueError:
            raise self._refusal("its signature is malformed") from None
        if signature != _encode(signer, value):
            raise self._refusal("its signature is malformed")
        if signer not in self._keys:
            raise self._refusal(f"it is signed by key {signer[:32]!r}")
        try:
            self._keys[signer].verify(value, _PURPOSE + manifest)
        except InvalidSignature:
            raise self._refusal(f"its signature by key {signer} is not of this manifest") from None

    def _refusal(self, problem: str) -> ArtifactUntrusted:
        known = ", ".join(sorted(self._keys))
        return ArtifactUntrusted(f"a signature by a configured key ({known}) is required to load an artifact; {problem}")


def key_id(key: Ed25519PublicKey) -> str:
    """16 hex digits that name a key in logs and signatures."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """Read an unencrypted PEM file. FieldOutOfRange if it holds no Ed25519 private key."""
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _no_key(path, "private", str(error)) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key(path, "private", "a key of another kind")
    return key


def load_public_key(path: Path) -> Ed25519PublicKey:
    """Read a PEM file. FieldOutOfRange if it holds no Ed25519 public key."""
    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise _no_key(path, "public", str(error)) from error
    if not isinstance(key, Ed25519PublicKey):
        raise _no_key(path, "public", "a key of another kind")
    return key


def _no_key(path: Path, kind: str, got: str) -> FieldOutOfRange:
    return FieldOutOfRange(f"{path} must hold an unencrypted Ed25519 {kind} key in PEM; got: {got}", field="key")
