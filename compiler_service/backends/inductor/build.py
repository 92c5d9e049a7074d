"""Compile a lowered program to an AOTInductor package and read back what came out."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import SymInt
from torch._inductor import aoti_compile_and_package

from compiler_service.backends.backend import BuiltEngine
from compiler_service.backends.inductor.declarations import buffers_kept
from compiler_service.backends.inductor.target import BuildTarget, build_toolchain
from compiler_service.export.program import DecoderProgram
from shared.bindings import LOGITS, AliasedBinding, BindingSpec, Role, pool_name
from shared.errors import BuildFailed
from shared.inductor.files import CONSTANTS_FILE, PACKAGE_DIRECTORY
from shared.inductor.package import Package
from shared.inductor.read_back import compare_pools
from shared.inductor.toolchain import CPU_ISA

BACKEND = "inductor"


def build_engine(program: DecoderProgram, target: BuildTarget, directory: Path) -> BuiltEngine:
    """Compile `program` into the empty `directory`. One generic package serves every profile.

    BuildFailed when Inductor fails, or when the package is not what the program says: a pool it would copy, a weight baked in.
    """
    archive = directory / "engine.pt2"
    options: dict[str, object] = {"aot_inductor.package_constants_in_so": False, **target.options}
    try:
        with torch.no_grad(), buffers_kept():
            aoti_compile_and_package(program.program, package_path=str(archive), inductor_configs=options)
    except RuntimeError as error:  # the base of everything Inductor and its C++ builder raise
        raise BuildFailed(f"Inductor could not compile the program: {error}") from error
    _unpack(archive, directory / PACKAGE_DIRECTORY)
    archive.unlink()
    package = Package(directory / PACKAGE_DIRECTORY, target.manifest_target.device)
    check_package(package, program)
    own = {name: value for name, value in program.constants.items() if name in package.constants}
    save_file(own, directory / CONSTANTS_FILE)
    return BuiltEngine(
        directory=directory,
        target=target.manifest_target,
        toolchain={**build_toolchain(), CPU_ISA: package.cpu_isa},
        bindings=_bindings(program),
        aliases=tuple(AliasedBinding(pool_name(layer), pool_name(layer)) for layer in range(program.cache.num_layers)),
        constants=dict(program.weights),
    )


def _unpack(archive: Path, directory: Path) -> None:
    """Unpack a .pt2 (a zip with one folder) as `directory`: loading it then needs no temporary copy."""
    scratch = directory.with_name(directory.name + ".unpacked")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(scratch)
    (folder,) = scratch.iterdir()
    folder.rename(directory)
    shutil.rmtree(scratch)


def check_package(package: Package, program: DecoderProgram) -> None:
    """BuildFailed unless the package writes every pool in place and leaves every weight to be bound."""
    for mismatch in compare_pools(package.pool_uses, program.cache):
        raise BuildFailed(
            f"Inductor made another engine than the program asks for: {mismatch.expected} expected; got {mismatch.got}"
        )
    if baked := sorted(program.weights.keys() - package.constants):
        # Inductor writes one-dimensional tensors of up to eight elements into the code: here, memory nobody initialised.
        raise BuildFailed(f"Inductor baked {len(baked)} weights into the code ({baked[0]}); they cannot be bound")
    if unknown := sorted(package.constants - program.weights.keys() - program.constants.keys()):
        raise BuildFailed(f"the package wants {len(unknown)} constants the program does not have ({unknown[0]})")


def _bindings(program: DecoderProgram) -> tuple[BindingSpec, ...]:
    """Inputs in call order, then the logits."""
    value_of = {node.name: node.meta["val"] for node in program.program.graph.find_nodes(op="placeholder")}
    bindings = []
    for placeholder, name in program.inputs.items():
        value = value_of[placeholder]
        shape = tuple(None if isinstance(size, SymInt) else size for size in value.shape)
        role = Role.CACHE if name.startswith("kv_pool.") else Role.INPUT
        bindings.append(BindingSpec(name, role, str(value.dtype).removeprefix("torch."), shape))
    return (*bindings, BindingSpec(LOGITS, Role.OUTPUT, "float32", (None, program.vocab_size)))
