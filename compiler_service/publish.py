"""The engine's artifact: its key over everything that went into the build, its manifest over everything that came out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch

from compiler_service.backends.backend import BuiltEngine
from compiler_service.export.program import DecoderProgram
from compiler_service.ingest.component import file_entry
from compiler_service.ingest.model import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, IngestedModel
from shared.artifacts.key import ArtifactKey
from shared.bindings import AliasedBinding
from shared.code_digest import code_digest
from shared.errors import BuildFailed
from shared.manifest import SCHEMA_VERSION, EngineManifest, Target, WriteCertificate

_SYMBOL = re.compile(r"\b[su]\d+\b")
_BUILDER = ("compiler_service/backends",)
"""Our own code that decides what a build makes of a program. What makes the program shows in its graph."""


def engine_key(
    model: IngestedModel,
    program: DecoderProgram,
    backend: str,
    target: Target,
    toolchain: dict[str, str],
    options: dict[str, bool],
) -> ArtifactKey:
    """Key of the engine that `backend` would make of `program`; nothing has to be built to know it."""
    return ArtifactKey.of(
        {
            "kind": "engine",
            "weights": model.file_sha256(WEIGHTS_FILE),
            "config": model.file_sha256(CONFIG_FILE),
            "tokenizer": model.file_sha256(TOKENIZER_FILE),
            "graph": describe_graph(program),
            "constants": {name: _tensor_digest(value) for name, value in program.constants.items()},
            "weight_names": program.weights,
            "profiles": asdict(program.profiles),
            "cache": asdict(program.cache),
            "backend": backend,
            "target": asdict(target),
            "toolchain": toolchain,
            "options": options,
            "builder": code_digest(_BUILDER),
        }
    )


def describe_graph(program: DecoderProgram) -> list[list[str]]:
    """The whole graph as text: every node with its operator, edges, constant arguments and the shape and type of its value.

    Two programs with the same text compute the same from the same inputs. Sizes are numbered in the order they appear: what
    torch calls them depends on what else the process has traced.
    """
    exported, sizes = program.program, _Sizes()
    nodes = [
        [
            node.op,
            node.name,
            str(node.target),
            repr(node.args),
            repr(sorted(node.kwargs.items())),
            sizes.rename(_value_text(node.meta.get("val"))),
        ]
        for node in exported.graph.nodes
    ]
    bindings = [["binding", placeholder, name] for placeholder, name in program.inputs.items()]
    ranges = sorted(["range", sizes.rename(str(size)), str(bounds)] for size, bounds in exported.range_constraints.items())
    lifted = [
        ["constant", name, _tensor_digest(value)]
        for name, value in sorted(exported.constants.items())
        if isinstance(value, torch.Tensor)
    ]
    return [*nodes, *bindings, *ranges, *lifted]


class _Sizes:
    """Names for the symbols of a graph, by first appearance."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def rename(self, text: str) -> str:
        return _SYMBOL.sub(lambda match: self._names.setdefault(match[0], f"size{len(self._names)}"), text)


def _value_text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    if isinstance(value, tuple | list):
        return str([_value_text(item) for item in value])
    return str(value)


def _tensor_digest(value: torch.Tensor) -> str:
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode() + data.tobytes()).hexdigest()


def certify(
    certificates: Sequence[WriteCertificate], aliases: Sequence[AliasedBinding], alias_of: Callable[[str], AliasedBinding]
) -> tuple[WriteCertificate, ...]:
    """The proof's certificates with the engine's side filled in: the binding that holds each cache, and whether it is aliased.
    `alias_of` gives the alias that keeps a cache in place.

    BuildFailed when a proven write did not end up in place: the promise of the proof was not kept. A write that is not proven is
    copied; its certificate says why.
    """
    filled = []
    for certificate in certificates:
        alias = alias_of(certificate.cache)
        filled.append(replace(certificate, binding=alias.input, aliased=alias in aliases))
    if lost := [certificate.cache for certificate in filled if not certificate.aliased and not certificate.reason]:
        raise BuildFailed(f"the writes of {', '.join(lost[:8])} are proven, but the engine reports no alias for their bindings")
    return tuple(filled)


def engine_manifest(
    key: ArtifactKey,
    model: IngestedModel,
    program: DecoderProgram,
    backend: str,
    built: BuiltEngine,
    proof: tuple[WriteCertificate, ...],
) -> EngineManifest:
    """The manifest of the engine whose files lie in `built.directory`, every one of them listed."""
    names = sorted(path.relative_to(built.directory).as_posix() for path in built.directory.rglob("*") if path.is_file())
    return EngineManifest(
        schema_version=SCHEMA_VERSION,
        artifact_id=key.artifact_id,
        kind="engine",
        model=model.facts,
        cache=program.cache,
        profiles=program.profiles,
        bindings=built.bindings,
        aliases=built.aliases,
        backend=backend,
        target=built.target,
        toolchain=built.toolchain,
        constants=built.constants,
        proof=proof,
        key_components=dict(key.components),
        files=tuple(file_entry(built.directory, name) for name in names),
    )
