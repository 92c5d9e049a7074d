"""The artifact store as the wire shows it. Blocking: the servicer calls it off the event loop."""

from __future__ import annotations

from dataclasses import replace

from compiler_service.service import convert
from shared.artifacts.key import ArtifactKey, explain_difference
from shared.artifacts.record import read_head
from shared.artifacts.store import UNREADABLE, ArtifactInfo, ArtifactStore
from shared.compatibility import compare
from shared.errors import ArtifactCorrupt, ArtifactNotFound, FieldOutOfRange
from shared.ids import check_artifact_id
from shared.manifest import decode_engine_manifest, decode_model_manifest
from shared.pb.quire.v1 import compiler_pb2

KINDS = ("engine", "model")
DEFAULT_PAGE, MAX_PAGE = 50, 500
MAX_SIGNATURE_BYTES = 1024
MAX_NEAREST = 5


def get(store: ArtifactStore, artifact_id: str) -> compiler_pb2.Artifact:
    check_artifact_id(artifact_id)
    for info in store.list():
        if info.artifact_id == artifact_id:
            return _message(store, info)
    raise ArtifactNotFound(f"no artifact {artifact_id} in this store")


def page(store: ArtifactStore, request: compiler_pb2.ListArtifactsRequest) -> compiler_pb2.ListArtifactsResponse:
    """Newest first; the page token is the id of the last artifact seen.

    Manifests and proofs are left out: a message has a greatest size. So is an artifact removed meanwhile; one whose manifest this
    version cannot read is shown as unreadable.
    """
    if request.kind and request.kind not in KINDS:
        raise FieldOutOfRange(f"kind must be {' or '.join(KINDS)}, or empty; got {request.kind[:40]!r}", field="kind")
    size = request.page_size or DEFAULT_PAGE
    if size > MAX_PAGE:
        raise FieldOutOfRange(f"page_size must be at most {MAX_PAGE}; got {size}", field="page_size")
    found = list(reversed(store.list(request.kind or None)))
    start = 0
    if request.page_token:
        ids = [info.artifact_id for info in found]
        if request.page_token not in ids:
            raise FieldOutOfRange("page_token: that artifact is gone or not of this listing; start over", field="page_token")
        start = ids.index(check_artifact_id(request.page_token, field="page_token")) + 1
    shown = found[start : start + size]
    more = start + size < len(found)
    return compiler_pb2.ListArtifactsResponse(
        artifacts=[line for info in shown if (line := _line(store, info)) is not None],
        next_page_token=shown[-1].artifact_id if more else "",
    )


def _line(store: ArtifactStore, info: ArtifactInfo) -> compiler_pb2.Artifact | None:
    try:
        message = _message(store, info)
    except ArtifactNotFound:
        return None
    except ArtifactCorrupt:
        return convert.unreadable_message(replace(info, kind=UNREADABLE))
    message.ClearField("proof")
    message.ClearField("manifest_json")
    return message


def _message(store: ArtifactStore, info: ArtifactInfo) -> compiler_pb2.Artifact:
    if info.kind == UNREADABLE:
        return convert.unreadable_message(info)
    manifest = store.manifest(info.artifact_id)
    if info.kind == "model":
        return convert.model_message(info, decode_model_manifest(manifest), manifest)
    return convert.engine_message(info, decode_engine_manifest(manifest), manifest)


def verify(store: ArtifactStore, artifact_id: str) -> compiler_pb2.VerifyArtifactResponse:
    """ArtifactCorrupt where a byte differs."""
    store.verify(check_artifact_id(artifact_id))
    head = read_head(store.manifest(artifact_id), artifact_id=artifact_id)
    return compiler_pb2.VerifyArtifactResponse(files_checked=len(head.files), bytes_checked=head.size_bytes)


def sign(store: ArtifactStore, request: compiler_pb2.SignArtifactRequest) -> compiler_pb2.SignArtifactResponse:
    """Keeps the signature; whether it is to be trusted is for whoever opens the artifact."""
    if not 0 < len(request.signature) <= MAX_SIGNATURE_BYTES:
        raise FieldOutOfRange(
            f"signature must be 1 to {MAX_SIGNATURE_BYTES} bytes; got {len(request.signature)}", field="signature"
        )
    store.add_signature(check_artifact_id(request.artifact_id), request.signature)
    return compiler_pb2.SignArtifactResponse()


def collect(store: ArtifactStore, request: compiler_pb2.CollectGarbageRequest) -> compiler_pb2.CollectGarbageResponse:
    max_age_s = None
    if request.HasField("max_age"):
        max_age_s = request.max_age.ToNanoseconds() / 1e9
        if max_age_s < 0:
            raise FieldOutOfRange(f"max_age must not be negative; got {max_age_s:g} s", field="max_age")
    report = store.gc(max_bytes=request.max_bytes if request.HasField("max_bytes") else None, max_age_s=max_age_s)
    return compiler_pb2.CollectGarbageResponse(
        removed=report.removed, failed=report.failed, freed_bytes=report.freed_bytes, left_bytes=report.left_bytes
    )


def explain_miss(store: ArtifactStore, key: ArtifactKey) -> compiler_pb2.ExplainMissResponse:
    """The engines whose keys differ from `key` in the fewest components, and where."""
    differences = []
    for info in store.list("engine"):
        try:
            found = decode_engine_manifest(store.manifest(info.artifact_id)).key_components
        except (ArtifactNotFound, ArtifactCorrupt):  # removed meanwhile, or of another version
            continue
        if names := explain_difference(key.components, found):
            differences.append((len(names), info.artifact_id, names))
    nearest = [
        compiler_pb2.KeyDifference(artifact_id=name, components=parts) for _, name, parts in sorted(differences)[:MAX_NEAREST]
    ]
    return compiler_pb2.ExplainMissResponse(artifact_id=key.artifact_id, hit=store.contains(key.artifact_id), nearest=nearest)


def compatibility(store: ArtifactStore, request: compiler_pb2.CheckCompatibilityRequest) -> compiler_pb2.CheckCompatibilityResponse:
    device = convert.device_from(request.device)
    manifest = store.manifest(check_artifact_id(request.artifact_id))
    if (kind := read_head(manifest, artifact_id=request.artifact_id).kind) != "engine":
        raise FieldOutOfRange(f"artifact_id must name an engine; {request.artifact_id} is a {kind}", field="artifact_id")
    return convert.compatibility_message(compare(decode_engine_manifest(manifest), device))
