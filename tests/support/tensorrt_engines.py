"""Engines of tiny decoders for TensorRT-RTX, built in this process: everything a test needs to run them elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from compiler_service.backends.tensorrt.backend import TensorRTBackend
from compiler_service.backends.tensorrt.flavour import Flavour
from compiler_service.export.geometry import cache_spec
from compiler_service.export.program import DecoderProgram, export_decoder
from compiler_service.ingest.model import WEIGHTS_FILE
from compiler_service.proof.certificate import ProofReport
from compiler_service.proof.decoder import prove_decoder
from compiler_service.publish import certify
from shared.kv_spec import DType, Layout
from shared.manifest import EngineManifest, encode_manifest
from shared.profiles import ProfileSet, parse_profile
from tests.support.built_manifest import manifest_of

BACKEND = TensorRTBackend.for_targets(Flavour.RTX, ("sm80",))


def backend(layout: Layout) -> TensorRTBackend:
    return replace(BACKEND, layout=layout)


@dataclass(frozen=True)
class Lowered:
    """A decoder on its way to TensorRT."""

    exported: DecoderProgram
    program: DecoderProgram
    report: ProofReport


def lower(
    config: PreTrainedConfig,
    profiles: tuple[str, ...],
    max_len: int,
    dtype: DType = DType.FLOAT32,
    *,
    page_size: int | None = None,
) -> Lowered:
    """Over linear caches, or over a pool of pages of `page_size` tokens."""
    layout = Layout.LINEAR if page_size is None else Layout.PAGED
    spec = cache_spec(config, dtype, layout, page_size or max_len, max_len)
    exported = export_decoder(config, spec, ProfileSet(tuple(map(parse_profile, profiles))), static_cache=True)
    return lower_program(exported)


def lower_program(exported: DecoderProgram, *, allow_copying: bool = False) -> Lowered:
    linear = BACKEND.lower(exported)
    report = prove_decoder(exported, linear)
    if not allow_copying:
        report.require()
    return Lowered(exported, backend(exported.cache.layout).place_caches(linear, report), report)


def build(
    lowered: Lowered,
    config: PreTrainedConfig,
    directory: Path,
    progress: list[float] | None = None,
    capabilities: tuple[str, ...] = ("sm80",),
    *,
    constant_weights: bool = False,
) -> EngineManifest:
    """Build into `directory`, with a manifest beside the plan. Fractions done are appended to `progress`. `constant_weights` takes
    the weights that `save_weights` left in `directory` into the plan."""
    done = [] if progress is None else progress
    builder = TensorRTBackend.for_targets(
        Flavour.RTX, capabilities, allow_copying=not lowered.report.ok, constant_weights=constant_weights
    )
    weights = directory / WEIGHTS_FILE
    built = builder.build(lowered.program, lowered.report, weights, directory, lambda fraction, _: done.append(fraction))
    proof = certify(lowered.report.certificates, built.aliases, backend(lowered.program.cache.layout).alias_of)
    manifest = manifest_of(built, BACKEND.name, lowered.program, config, proof)
    (directory / "manifest.json").write_bytes(encode_manifest(manifest))
    return manifest


def save_weights(lowered: Lowered, model: PreTrainedModel, path: Path) -> None:
    tensors = model.state_dict()
    save_file({name: tensors[name].clone() for name in set(lowered.program.weights.values())}, path)
