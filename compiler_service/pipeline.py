"""From a spec to a published engine: fetch, load, export, lower, prove, build, verify, publish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from transformers import PreTrainedConfig

from compiler_service.backends.backend import Backend
from compiler_service.backends.choose import choose_backend
from compiler_service.export.geometry import cache_spec
from compiler_service.export.program import DecoderProgram, export_decoder
from compiler_service.ingest.convert import ingest, open_source
from compiler_service.ingest.digest import DigestCache
from compiler_service.ingest.model import IngestedModel
from compiler_service.ingest.program import ProgramModel, open_program
from compiler_service.ingest.source import SourceKind, locate
from compiler_service.lowering.adopt import adopt_program
from compiler_service.lowering.device import on_device
from compiler_service.proof.certificate import ProofReport
from compiler_service.proof.decoder import prove_decoder
from compiler_service.publish import certify, engine_key, engine_manifest
from compiler_service.spec import CompileSpec
from shared.artifacts.key import ArtifactKey
from shared.artifacts.store import ArtifactStore
from shared.errors import ArtifactCorrupt, ArtifactNotFound
from shared.ids import ArtifactId
from shared.kv_spec import DType
from shared.manifest import WriteCertificate, encode_manifest


class Stage(StrEnum):
    FETCH = "fetch"
    LOAD = "load"
    EXPORT = "export"
    LOWER = "lower"
    PROVE = "prove"
    BUILD = "build"
    VERIFY = "verify"
    PUBLISH = "publish"


Progress = Callable[[Stage, float, str], None]
"""(stage, fraction of it done 0..1, message)."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """What builds share. `model_roots` confines sources (compiler_service/ingest/source.py)."""

    store: ArtifactStore
    digests: DigestCache
    model_roots: tuple[Path, ...] | None


@dataclass(frozen=True, slots=True)
class BuildResult:
    """`reused`: an engine of the same key was there already and nothing was built."""

    artifact_id: ArtifactId
    reused: bool


def build(spec: CompileSpec, workspace: Workspace, progress: Progress, before_publish: Callable[[], None]) -> BuildResult:
    """Build and publish the engine of `spec`. `before_publish` is called once, when everything else is done.

    Raises the errors of each stage; nothing but the model's component is in the store then.
    """
    store, backend = workspace.store, choose_backend(spec)
    with _planned(spec, backend, workspace, progress) as plan:
        artifact_id = plan.key.artifact_id
        if _is_whole(store, artifact_id):
            progress(Stage.PUBLISH, 1.0, "reused: the store has an engine of this key")
            return BuildResult(artifact_id, reused=True)
        with store.stage() as directory:
            built = backend.build(
                plan.program, plan.report, plan.model.weights, directory, lambda f, m: progress(Stage.BUILD, f, m)
            )
            progress(Stage.VERIFY, 0.0, "compare the engine with the exported program")
            backend.verify(built, plan.exported, plan.model.weights)
            proof = certify(plan.report.certificates, built.aliases, backend.alias_of)
            manifest = engine_manifest(plan.key, plan.model, plan.program, backend.name, built, proof)
            before_publish()
            progress(Stage.PUBLISH, 0.0, artifact_id)
            published = store.publish(artifact_id, directory, encode_manifest(manifest))
        progress(Stage.PUBLISH, 1.0, "published" if published else "reused: another build published this key first")
        return BuildResult(artifact_id, reused=not published)


def key(spec: CompileSpec, workspace: Workspace, progress: Progress) -> ArtifactKey:
    """Key of the engine that `build` would make of `spec`; raises what `build` would before it builds."""
    with _planned(spec, choose_backend(spec), workspace, progress) as plan:
        return plan.key


def explain(spec: CompileSpec, workspace: Workspace, progress: Progress) -> tuple[WriteCertificate, ...]:
    """The certificates of every cache write of `spec`, proven or not. Reads headers only; nothing is built or stored."""
    backend = choose_backend(spec)
    progress(Stage.FETCH, 0.0, spec.source)
    with open_source(locate(spec.source, workspace.model_roots)) as opened:
        definition = opened if isinstance(opened, ProgramModel) else opened.config
        exported = on_device(_export(spec, backend, definition, progress), backend.program_device)
    return _prove(exported, backend, progress)[1].certificates


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything there is to know of a build before anything is built."""

    model: IngestedModel
    exported: DecoderProgram
    program: DecoderProgram
    report: ProofReport
    key: ArtifactKey


@contextmanager
def _planned(spec: CompileSpec, backend: Backend, workspace: Workspace, progress: Progress) -> Iterator[_Plan]:
    """The stages up to the proof. The model's component is held in the store until the context ends."""
    progress(Stage.FETCH, 0.0, spec.source)
    source = locate(spec.source, workspace.model_roots)
    loading = ingest(source, spec.dtype, workspace.store, workspace.digests, lambda f, m: progress(Stage.LOAD, f, m))
    with loading as (model, was_converted):
        progress(Stage.LOAD, 1.0, f"{model.name}, {'weights reused' if was_converted else 'weights converted'}")
        definition = open_program(source) if source.kind is SourceKind.PROGRAM else model.config
        exported = on_device(_export(spec, backend, definition, progress), backend.program_device)
        linear, report = _prove(exported, backend, progress)
        if not spec.allow_copying:
            report.require()
        program = backend.place_caches(linear, report)
        name = engine_key(model, program, backend.name, backend.target, backend.toolchain, backend.options)
        yield _Plan(model, exported, program, report, name)


def _export(spec: CompileSpec, backend: Backend, definition: PreTrainedConfig | ProgramModel, progress: Progress) -> DecoderProgram:
    """The linear program: traced from a configuration, or adopted where somebody exported it already."""
    config = definition.config if isinstance(definition, ProgramModel) else definition
    progress(Stage.EXPORT, 0.0, f"{config.num_hidden_layers} layers, {', '.join(map(str, spec.profiles.profiles))}")
    if isinstance(definition, ProgramModel):
        definition.require_dtype(spec.dtype)
        cache = definition.cache_spec(spec.layout, spec.page_size, spec.max_len)
        return adopt_program(definition.program, definition.layers, cache, spec.profiles)
    cache = cache_spec(config, DType(spec.dtype), spec.layout, spec.page_size, spec.max_len)
    return export_decoder(config, cache, spec.profiles, static_cache=backend.static_cache)


def _prove(exported: DecoderProgram, backend: Backend, progress: Progress) -> tuple[DecoderProgram, ProofReport]:
    """The lowered linear program and the verdicts on its writes."""
    progress(Stage.LOWER, 0.0, "functional form")
    linear = backend.lower(exported)
    progress(Stage.PROVE, 0.0, f"{2 * exported.cache.num_layers} cache writes")
    report = prove_decoder(exported, linear)
    progress(Stage.PROVE, 1.0, f"{len(report.proven_nodes)} of {len(report.caches)} cache writes proven")
    return linear, report


def _is_whole(store: ArtifactStore, artifact_id: ArtifactId) -> bool:
    """A damaged artifact is as good as none: publishing replaces it."""
    try:
        store.verify(artifact_id)
    except (ArtifactNotFound, ArtifactCorrupt):
        return False
    return True
