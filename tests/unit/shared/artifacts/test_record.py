"""The seal around a manifest, and the head that a store reads in it."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shared.artifacts.record import check_file_name, read_head, seal, unseal
from shared.errors import ArtifactCorrupt
from shared.manifest import FileEntry, canonical_json

A, B = "a" * 64, "b" * 64
MANIFEST: dict[str, Any] = {
    "artifact_id": A,
    "kind": "engine",
    "model": {"model_id": B, "name": "m"},
    "files": [{"path": "engine.pt2", "sha256": "c" * 64, "size": 7}],
    "more": [1],
}


def test_a_seal_is_readable_json_lines() -> None:
    """An operator's jq reads the file; its first line is the manifest, byte for byte."""
    sealed = seal(canonical_json(MANIFEST))
    manifest, digest = (json.loads(line) for line in sealed.splitlines())
    assert manifest == MANIFEST
    assert len(digest) == 64
    assert unseal(sealed) == canonical_json(MANIFEST)


@given(content=st.binary(max_size=60).filter(lambda b: b"\n" not in b), change=st.data())
def test_any_changed_byte_breaks_the_seal(content: bytes, change: st.DataObject) -> None:
    sealed = seal(content)
    assert unseal(sealed) == content
    position = change.draw(st.integers(0, len(sealed) - 1))
    value = change.draw(st.integers(0, 255).filter(lambda v: v != sealed[position]))
    with pytest.raises(ArtifactCorrupt):
        unseal(sealed[:position] + bytes([value]) + sealed[position + 1 :])
    with pytest.raises(ArtifactCorrupt):
        unseal(sealed[:position])
    with pytest.raises(ArtifactCorrupt):
        unseal(sealed + b"\n")


def test_only_one_line_can_be_sealed() -> None:
    with pytest.raises(ValueError, match="line break"):
        seal(b"{\n}")


def test_the_head_of_an_engine_and_of_a_model() -> None:
    head = read_head(canonical_json(MANIFEST), artifact_id=A)
    assert (head.artifact_id, head.kind, head.model_id, head.size_bytes) == (A, "engine", B, 7)
    assert head.files == (FileEntry("engine.pt2", "c" * 64, 7),)
    assert read_head(canonical_json(MANIFEST | {"model": None}), artifact_id=A).model_id is None


@pytest.mark.parametrize(
    "change",
    [
        {"artifact_id": B},
        {"artifact_id": 7},
        {"artifact_id": "short"},
        {"kind": None},
        {"model": {"model_id": "x"}},
        {"model": [1]},
        {"files": None},
        {"files": [{"path": "f", "sha256": "c" * 64}]},
        {"files": [{"path": "f", "sha256": "c" * 63, "size": 1}]},
        {"files": [{"path": "f", "sha256": "c" * 64, "size": -1}]},
        {"files": [{"path": "f", "sha256": "c" * 64, "size": True}]},
        {"files": [{"path": "f", "sha256": "c" * 64, "size": 1.0}]},
        {"files": [{"path": 7, "sha256": "c" * 64, "size": 1}]},
        {"files": [{"path": "f", "sha256": 7, "size": 1}]},
        {"files": [{"path": "f", "sha256": "c" * 64, "size": 1}] * 2},
        {"files": [{"path": "../f", "sha256": "c" * 64, "size": 1}]},
    ],
    ids=str,
)
def test_heads_no_store_can_serve_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ArtifactCorrupt):
        read_head(canonical_json(MANIFEST | change), artifact_id=A)


@pytest.mark.parametrize("manifest", [b"", b"{", b"[]", b"null", b"7", b"\xff", b"[" * 100_000, b'{"files":[]}'])
def test_what_is_no_manifest_is_refused(manifest: bytes) -> None:
    with pytest.raises(ArtifactCorrupt):
        read_head(manifest, artifact_id=A)


@pytest.mark.parametrize("name", ["a", "a/b.c", ".hidden", "a-b_c.d/E9", "..a", "a..b", "sub/manifest.json", "x" * 255])
def test_plain_names_pass(name: str) -> None:
    assert check_file_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        ".",
        "..",
        "a/..",
        "../a",
        "/a",
        "a/",
        "a//b",
        "",
        "a\\b",
        "a\nb",
        "a\n",
        "~",
        "a:b",
        "x" * 256,
        "manifest.json",
        "manifest.sig",
    ],
)
def test_other_names_do_not(name: str) -> None:
    with pytest.raises(ArtifactCorrupt):
        check_file_name(name)
