"""The manifest of an engine that is built for a test or a figure and never published."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedConfig

from compiler_service.backends.backend import BuiltEngine
from compiler_service.export.program import DecoderProgram
from shared.manifest import SCHEMA_VERSION, EngineManifest, ModelFacts, WriteCertificate


def manifest_of(
    built: BuiltEngine, backend: str, program: DecoderProgram, config: PreTrainedConfig, proof: Iterable[WriteCertificate]
) -> EngineManifest:
    """What `built` is, of `program`; its model is nobody's, so its ids and files are none."""
    weights = {name: program.program.state_dict[parameter].nbytes for parameter, name in program.weights.items()}
    return EngineManifest(
        schema_version=SCHEMA_VERSION,
        artifact_id="0" * 64,
        kind="engine",
        model=ModelFacts(
            model_id="1" * 64,
            name="random",
            architecture=config.model_type,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            max_position=config.max_position_embeddings,
            bos_token_id=None,
            eos_token_ids=(),
            weights_dtype=program.cache.group_of(0).dtype.value,
            weights_bytes=sum(weights.values()),
        ),
        cache=program.cache,
        profiles=program.profiles,
        bindings=built.bindings,
        aliases=built.aliases,
        backend=backend,
        target=built.target,
        toolchain=built.toolchain,
        constants=built.constants,
        proof=tuple(proof),
        key_components={},
        files=(),
    )
