"""Loading only what somebody with a configured key has signed."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from shared.artifacts.locate import StoreLocation, open_store
from shared.artifacts.record import SIGNATURE_NAME
from shared.artifacts.signing import TrustedKeys, key_id, load_private_key, load_public_key, sign_manifest
from shared.errors import ArtifactCorrupt, ArtifactUntrusted, FieldOutOfRange
from tests.support.artifact_stores import FILES, A, B, Backend, LocalBackend, contents, publish

KEY, OTHER_KEY = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
TRUST = TrustedKeys([KEY.public_key()])


def sign(backend: Backend, artifact_id: str, key: Ed25519PrivateKey = KEY) -> None:
    store = backend.open()
    store.add_signature(artifact_id, sign_manifest(key, store.manifest(artifact_id)))


def test_a_signed_artifact_opens_and_an_unsigned_one_does_not(backend: Backend) -> None:
    publish(backend.open())
    with pytest.raises(ArtifactUntrusted, match="no signature"):
        backend.open(TRUST).open(A)
    with pytest.raises(ArtifactUntrusted):
        backend.open(TRUST).verify(A)
    sign(backend, A)
    assert contents(backend.open(TRUST)) == FILES
    backend.open(TRUST).verify(A)
    assert contents(backend.open()) == FILES, "a store without keys does not mind the signature"


def test_another_keys_signature_does_not_count_until_it_is_trusted(backend: Backend) -> None:
    publish(backend.open())
    sign(backend, A, OTHER_KEY)
    with pytest.raises(ArtifactUntrusted, match=key_id(OTHER_KEY.public_key())):
        backend.open(TRUST).open(A)
    assert contents(backend.open(TrustedKeys([KEY.public_key(), OTHER_KEY.public_key()]))) == FILES
    sign(backend, A)
    assert contents(backend.open(TRUST)) == FILES, "a later signature takes the place of an earlier one"


def test_another_artifacts_signature_does_not_fit(backend: Backend) -> None:
    store = backend.open()
    publish(store, A)
    publish(store, B)
    store.add_signature(A, sign_manifest(KEY, store.manifest(B)))
    with pytest.raises(ArtifactUntrusted, match="not of this manifest"):
        backend.open(TRUST).open(A)


def test_a_rebuilt_artifact_must_be_signed_again(backend: Backend) -> None:
    """Somebody who can write to the store replaces engine, manifest and seal, and keeps the signature."""
    publish(backend.open())
    sign(backend, A)
    signature = sign_manifest(KEY, backend.open().manifest(A))
    backend.open().delete(A)
    publish(backend.open(), files=FILES | {"engine.bin": b"evil"})
    backend.open().add_signature(A, signature)
    with pytest.raises(ArtifactUntrusted, match="not of this manifest"):
        backend.open(TRUST).open(A)


@pytest.mark.parametrize(
    "signature",
    [
        b"",
        b"\xff\xfe",
        b"ed25519",
        b"a b c d",
        b"rsa %s 00\n",
        b"ed25519 %s zz\n",
        b"ed25519 %s 0A\n",
        b"ed25519 %s 00",
        b"ed25519 %s 00\n",
    ],
)
def test_malformed_signatures_are_refused(backend: Backend, signature: bytes) -> None:
    publish(backend.open())
    backend.open().add_signature(A, signature.replace(b"%s", key_id(KEY.public_key()).encode()))
    with pytest.raises(ArtifactUntrusted):
        backend.open(TRUST).open(A)


def test_every_byte_of_the_signature_counts(local: LocalBackend) -> None:
    publish(local.open())
    sign(local, A)
    path = local.directory(A) / SIGNATURE_NAME
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 2]) + good[position + 1 :])
        with pytest.raises(ArtifactUntrusted):
            local.open(TRUST).verify(A)


def test_damage_under_a_good_signature_is_damage(backend: Backend) -> None:
    publish(backend.open())
    sign(backend, A)
    backend.damage(A, "engine.bin", lambda content: content[::-1])
    with pytest.raises(ArtifactCorrupt):
        backend.open(TRUST).open(A)


def test_trusting_nobody_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="at least one key"):
        TrustedKeys([])


def test_keys_come_from_pem_files(tmp_path: Path) -> None:
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    private.write_bytes(KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert key_id(load_private_key(private).public_key()) == key_id(load_public_key(public)) == key_id(KEY.public_key())
    store = open_store(StoreLocation(str(tmp_path / "store"), "", 0), trusted_keys=[public])
    publish(store)
    with pytest.raises(ArtifactUntrusted):
        store.open(A)
    store.add_signature(A, sign_manifest(load_private_key(private), store.manifest(A)))
    assert contents(store) == FILES


def test_other_files_are_no_keys(tmp_path: Path) -> None:
    other = X25519PrivateKey.generate()
    files = {
        "text": b"no key",
        "empty": b"",
        "private": other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        "public": other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name in (*files, "missing"):
        with pytest.raises(FieldOutOfRange, match="Ed25519"):
            load_public_key(tmp_path / name)
        with pytest.raises(FieldOutOfRange, match="Ed25519"):
            load_private_key(tmp_path / name)
