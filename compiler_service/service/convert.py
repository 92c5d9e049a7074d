"""Wire messages <-> the compiler's own values. No decisions but the wire's defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from compiler_service.spec import CompileSpec, decode_spec, profile_set
from shared.artifacts.store import ArtifactInfo
from shared.compatibility import Compatibility, Device, Level
from shared.errors import ArtifactCorrupt, FieldOutOfRange
from shared.jobs.job import Job, JobError, JobEvent, JobLimits, JobState
from shared.kv_spec import Layout
from shared.manifest import EngineManifest, FileEntry, ModelManifest, WriteCertificate
from shared.pb.quire.v1 import common_pb2, compiler_pb2
from shared.profiles import OptimizationProfile, Range
from shared.rpc.messages import BACKENDS, DTYPES, LAYOUTS, profile_message
from shared.rpc.status import code_of, error_class

DEFAULT_PAGE_SIZE = 16
MAX_LISTED = 64
"""Profiles, and targets, of one spec."""
_PROFILE_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_Word = TypeVar("_Word")
_Number = TypeVar("_Number")

_LEVELS = {
    Level.OPTIMAL: compiler_pb2.COMPATIBILITY_OPTIMAL,
    Level.PREFER_RECOMPILE: compiler_pb2.COMPATIBILITY_PREFER_RECOMPILE,
    Level.UNSUPPORTED: compiler_pb2.COMPATIBILITY_UNSUPPORTED,
}


def spec_from(message: compiler_pb2.CompileSpec) -> CompileSpec:
    """FieldOutOfRange names the field. `page_size` 0 is the layout's own size; without `targets` inductor builds for this CPU."""
    backend = _word(BACKENDS, message.backend, "spec.backend")
    layout = _word(LAYOUTS, message.layout, "spec.layout")
    default_page = message.max_len if layout is Layout.LINEAR else DEFAULT_PAGE_SIZE
    for field in ("profiles", "targets"):
        if (count := len(getattr(message, field))) > MAX_LISTED:
            raise FieldOutOfRange(f"spec.{field} must hold at most {MAX_LISTED} entries; got {count}", field=f"spec.{field}")
    return CompileSpec(
        source=message.source,
        backend=backend,
        layout=layout,
        dtype=_word(DTYPES, message.dtype, "spec.dtype"),
        max_len=message.max_len,
        page_size=message.page_size or default_page,
        profiles=profile_set(tuple(_profile_from(profile) for profile in message.profiles)),
        targets=tuple(message.targets) or (("cpu",) if backend == "inductor" else ()),
        allow_copying=message.allow_copying,
        constant_weights=message.constant_weights,
    )


def _word(words: dict[_Word, Any], value: int, field: str) -> _Word:
    for word, known in words.items():
        if known == value:
            return word
    raise FieldOutOfRange(f"{field} must be one of {', '.join(map(str, words))}; got the number {value}", field=field)


def _profile_from(message: common_pb2.OptimizationProfile) -> OptimizationProfile:
    if not _PROFILE_NAME.fullmatch(message.name):
        raise FieldOutOfRange(
            f"spec.profiles: a name is a lower-case letter, then letters, digits and _; got {message.name[:40]!r}",
            field="spec.profiles",
        )
    where = f"spec.profiles.{message.name}"
    return OptimizationProfile(
        message.name, _range_from(message.batch, f"{where}.batch"), _range_from(message.query_len, f"{where}.query_len")
    )


def _range_from(message: common_pb2.SizeRange, field: str) -> Range:
    """Without an optimum the middle of the range is the one. A minimum or a maximum of 0 is refused, not guessed."""
    try:
        return Range(message.min, message.opt or (message.min + message.max) // 2, message.max)
    except ValueError as error:
        raise FieldOutOfRange(f"{field}: {error}", field=field) from error


def spec_message(spec: CompileSpec) -> compiler_pb2.CompileSpec:
    return compiler_pb2.CompileSpec(
        source=spec.source,
        backend=BACKENDS[spec.backend],
        layout=LAYOUTS[spec.layout],
        dtype=DTYPES[spec.dtype],
        max_len=spec.max_len,
        page_size=spec.page_size,
        profiles=[profile_message(profile) for profile in spec.profiles.profiles],
        targets=spec.targets,
        allow_copying=spec.allow_copying,
        constant_weights=spec.constant_weights,
    )


def limits_from(message: compiler_pb2.JobLimits) -> JobLimits:
    """A limit of 0 is one not given: its default holds."""
    return JobLimits(**{descriptor.name: value for descriptor, value in message.ListFields()})


def job_message(job: Job) -> compiler_pb2.CompileJob:
    """Without its spec if that is another version's: one such job must not keep the others from being listed."""
    spec: compiler_pb2.CompileSpec | None
    try:
        spec = spec_message(decode_spec(job.spec))
    except FieldOutOfRange:
        spec = None
    return compiler_pb2.CompileJob(
        job_id=job.job_id,
        request_id=job.request_id,
        spec=spec,
        limits=compiler_pb2.JobLimits(
            max_runtime_s=job.limits.max_runtime_s,
            max_pending_s=job.limits.max_pending_s,
            max_host_bytes=job.limits.max_host_bytes,
            max_attempts=job.limits.max_attempts,
        ),
        state=state_value(job.state),
        stage=stage_value(job.stage),
        attempt=job.attempt,
        artifact_id=job.artifact_id,
        reused=job.reused,
        error=None if job.error is None else error_message(job.error),
        created_at=timestamp(job.created_s),
        started_at=timestamp(job.started_s),
        finished_at=timestamp(job.finished_s),
    )


def event_message(event: JobEvent, ended: Job | None) -> compiler_pb2.JobEvent:
    """`ended` is the job, for its terminal event."""
    message = compiler_pb2.JobEvent(
        sequence=event.sequence,
        state=state_value(event.state),
        stage=stage_value(event.stage),
        fraction=event.fraction,
        message=event.message,
        time=timestamp(event.time_s),
        rss_bytes=event.rss_bytes,
        attempt=event.attempt,
    )
    if ended is not None:
        message.artifact_id, message.reused = ended.artifact_id, ended.reused
        if ended.error is not None:
            message.error.CopyFrom(error_message(ended.error))
    return message


def error_message(error: JobError) -> common_pb2.Error:
    return common_pb2.Error(
        code=code_of(error_class(error.reason)).value[0],
        reason=error.reason,
        message=error.message,
        retryable=error.retryable,
        metadata=error.details,
        field=error.at,
    )


def state_value(state: JobState) -> compiler_pb2.JobState.ValueType:
    return compiler_pb2.JobState.Value(f"JOB_STATE_{state.name}")


def state_from(value: int) -> JobState:
    for state in JobState:
        if state_value(state) == value:
            return state
    raise FieldOutOfRange(f"states: {value} is not a job state", field="states")


def stage_value(stage: str) -> compiler_pb2.BuildStage.ValueType:
    """Unspecified before the first stage, and in one that another version's worker has."""
    number = compiler_pb2.BuildStage.DESCRIPTOR.values_by_name.get(f"BUILD_STAGE_{stage.upper()}")
    return compiler_pb2.BUILD_STAGE_UNSPECIFIED if number is None else compiler_pb2.BuildStage.ValueType(number.number)


def timestamp(seconds: float | None) -> Timestamp | None:
    if seconds is None:
        return None
    message = Timestamp()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def proof_message(certificate: WriteCertificate) -> common_pb2.CacheProof:
    return common_pb2.CacheProof(
        cache=certificate.cache,
        node=certificate.node,
        form=certificate.form,
        # A write that is no run has no axis.
        axis=max(certificate.axis, 0),
        start=certificate.start,
        length=certificate.length,
        verdict_before=certificate.verdict_before,
        verdict_after=certificate.verdict_after,
        binding=certificate.binding,
        aliased=certificate.aliased,
        reason=certificate.reason,
    )


def _number(words: Mapping[_Word, _Number], word: _Word) -> _Number:
    """A word of a manifest as the wire has it; ArtifactCorrupt for one that only another version knows."""
    if word not in words:
        raise ArtifactCorrupt(f"a manifest of this version has {', '.join(map(str, words))}; this one has {str(word)[:80]!r}")
    return words[word]


def engine_message(info: ArtifactInfo, manifest: EngineManifest, manifest_json: bytes) -> compiler_pb2.Artifact:
    """ArtifactCorrupt as for `model_message`."""
    cache = manifest.cache
    return compiler_pb2.Artifact(
        artifact_id=info.artifact_id,
        kind=info.kind,
        model_name=manifest.model.name,
        model_id=manifest.model.model_id,
        backend=_number(BACKENDS, manifest.backend),
        layout=LAYOUTS[cache.layout],
        dtype=_number(DTYPES, cache.groups[0].dtype.value),
        max_len=cache.max_len,
        page_size=cache.page_size,
        profiles=[profile_message(profile) for profile in manifest.profiles.profiles],
        proof=[proof_message(certificate) for certificate in manifest.proof],
        files=_file_messages(manifest.files),
        size_bytes=info.size_bytes,
        published_at=timestamp(info.published_s),
        manifest_json=manifest_json,
    )


def model_message(info: ArtifactInfo, manifest: ModelManifest, manifest_json: bytes) -> compiler_pb2.Artifact:
    """ArtifactCorrupt where the manifest has a word that the wire has not."""
    facts = manifest.facts
    return compiler_pb2.Artifact(
        artifact_id=info.artifact_id,
        kind=info.kind,
        model_name=facts.name,
        model_id=facts.model_id,
        dtype=_number(DTYPES, facts.weights_dtype),
        files=_file_messages(manifest.files),
        size_bytes=info.size_bytes,
        published_at=timestamp(info.published_s),
        manifest_json=manifest_json,
    )


def unreadable_message(info: ArtifactInfo) -> compiler_pb2.Artifact:
    """An artifact whose manifest is damaged, or of another version: it can only be deleted."""
    return compiler_pb2.Artifact(
        artifact_id=info.artifact_id, kind=info.kind, size_bytes=info.size_bytes, published_at=timestamp(info.published_s)
    )


def _file_messages(files: tuple[FileEntry, ...]) -> list[compiler_pb2.ArtifactFile]:
    return [compiler_pb2.ArtifactFile(path=entry.path, sha256=entry.sha256, size_bytes=entry.size) for entry in files]


def device_from(message: compiler_pb2.DeviceDescription) -> Device:
    if message.kind not in ("cpu", "cuda"):
        raise FieldOutOfRange(f"device.kind must be cpu or cuda; got {message.kind[:40]!r}", field="device.kind")
    return Device(message.kind, frozenset(message.isa), message.compute_capability, dict(message.toolchain))


def compatibility_message(found: Compatibility) -> compiler_pb2.CheckCompatibilityResponse:
    return compiler_pb2.CheckCompatibilityResponse(
        compatibility=_LEVELS[found.level], field=found.field, expected=found.expected, got=found.got
    )
