"""An engine of a model's shape with seeded random weights made on the device: no checkpoint is read, nothing is published."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

from compiler_service.backends.inductor.backend import InductorBackend
from compiler_service.export.geometry import cache_spec
from compiler_service.export.program import DecoderProgram, export_decoder
from compiler_service.lowering.device import on_device
from compiler_service.proof.decoder import prove_decoder
from compiler_service.spec import profile_set
from runtime_service.engine.graphs import GraphedSteps
from runtime_service.engine.inductor import HostSteps, InductorEngine
from runtime_service.engine.weights import ModelWeights
from shared.inductor.files import CONSTANTS_FILE, PACKAGE_DIRECTORY
from shared.inductor.package import Package
from shared.kv_spec import DType, Layout
from tests.support.built_manifest import manifest_of


def llama_3_8b(num_layers: int = 32) -> LlamaConfig:
    """The shape of Llama 3 8B, or of its first layers."""
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )


@dataclass(frozen=True)
class EngineShape:
    """What is compiled. `target` is `cpu` or the host GPU's compute capability."""

    config: PreTrainedConfig
    dtype: DType
    max_len: int
    page_size: int
    profiles: tuple[str, ...]
    target: str


def build_random_engine(shape: EngineShape, directory: Path) -> tuple[InductorEngine, ModelWeights]:
    """Compile `shape` into the empty `directory` and bind it to random weights. Proven like any other; not probed."""
    cache = cache_spec(shape.config, shape.dtype, Layout.PAGED, shape.page_size, shape.max_len)
    backend = InductorBackend.for_target(shape.target)
    exported = on_device(export_decoder(shape.config, cache, profile_set(shape.profiles)), backend.program_device)
    linear = backend.lower(exported)
    report = prove_decoder(exported, linear)
    report.require()
    program = backend.place_caches(linear, report)
    weights = ModelWeights(random_weights(program, backend.program_device))
    unread = directory / "weights.safetensors"  # a package has its weights beside it
    built = backend.build(program, report, unread, directory, lambda *_: None)
    manifest = manifest_of(built, backend.name, program, shape.config, report.certificates)
    constants = load_file(directory / CONSTANTS_FILE, device=backend.program_device)
    constants |= {constant: weights.tensors[name] for constant, name in built.constants.items()}
    bound = Package(directory / PACKAGE_DIRECTORY, backend.program_device).bind(constants)
    steps = HostSteps(bound, manifest) if backend.program_device == "cpu" else GraphedSteps(bound.run, manifest)
    return InductorEngine(manifest, steps, weights, ExitStack()), weights


def random_weights(program: DecoderProgram, device: str) -> dict[str, Tensor]:
    """By checkpoint name: norms are ones, matrices normal with deviation 0.02, fixed by a seed on each device."""
    generator = torch.Generator(device).manual_seed(0)
    weights: dict[str, Tensor] = {}
    for parameter, name in program.weights.items():
        like = program.program.state_dict[parameter]
        weights[name] = torch.ones_like(like) if like.dim() == 1 else torch.empty_like(like).normal_(0, 0.02, generator=generator)
    return {name: weight.detach() for name, weight in weights.items()}
