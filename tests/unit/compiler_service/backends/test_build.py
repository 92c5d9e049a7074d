"""What comes out of a build is read back: a package that is not the program's is refused, a sound one is verified by running it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from torch import Tensor

from compiler_service.backends.backend import BuiltEngine
from compiler_service.backends.inductor.build import build_engine, check_package
from compiler_service.backends.inductor.probe import verify_engine
from compiler_service.backends.inductor.target import host_target
from compiler_service.export.program import DecoderProgram, export_decoder
from shared.errors import BuildFailed
from shared.inductor.files import CONSTANTS_FILE, PACKAGE_DIRECTORY
from shared.inductor.package import BoundPackage, Package, PoolUse
from shared.kv_spec import Layout
from shared.manifest import EngineManifest, decode_engine_manifest
from tests.support.engines import TinyEngine, tiny_engine
from tests.support.sources import source_config

Export = Callable[[str, Layout], DecoderProgram]


@pytest.fixture(scope="module")
def tiny() -> TinyEngine:
    return tiny_engine("llama", Layout.LINEAR)


@pytest.fixture(scope="module")
def manifest(tiny: TinyEngine) -> EngineManifest:
    return decode_engine_manifest(tiny.store.manifest(tiny.engine_id))


@pytest.fixture(scope="module")
def built(tiny: TinyEngine, manifest: EngineManifest, tmp_path_factory: pytest.TempPathFactory) -> BuiltEngine:
    """The build's result, put together again from the published artifact."""
    directory = tmp_path_factory.mktemp("engine")
    with tiny.store.open(tiny.engine_id) as handle:
        shutil.copytree(handle.path(f"{PACKAGE_DIRECTORY}/archive_format").parent, directory / PACKAGE_DIRECTORY)
        shutil.copy(handle.path(CONSTANTS_FILE), directory)
    return BuiltEngine(directory, manifest.target, manifest.toolchain, manifest.bindings, manifest.aliases, manifest.constants)


@pytest.fixture(scope="module")
def weights(tiny: TinyEngine) -> Path:
    with tiny.store.open(tiny.model_id) as handle:
        return handle.path("weights.safetensors")


def reexported(manifest: EngineManifest, **changes: object) -> DecoderProgram:
    """The export the engine came from, or that of a slightly different model."""
    config = source_config("llama")
    for name, value in changes.items():
        setattr(config, name, value)
    return export_decoder(config, manifest.cache, manifest.profiles)


def test_bindings_are_in_call_order_with_free_axes(manifest: EngineManifest) -> None:
    shapes = {binding.name: (binding.role.value, binding.dtype, binding.shape) for binding in manifest.bindings}
    assert list(shapes.items()) == [
        ("input_ids", ("input", "int32", (None, None))),
        ("position_ids", ("input", "int32", (None, None))),
        ("write_start", ("input", "int32", (None,))),
        ("last_index", ("input", "int32", (None,))),
        ("block_table", ("input", "int32", (None, 1))),
        ("kv_pool.0", ("cache", "float32", (2, None, 2, 48, 16))),
        ("kv_pool.1", ("cache", "float32", (2, None, 2, 48, 16))),
        ("logits", ("output", "float32", (None, 400))),
    ]


def test_the_engine_is_small_and_holds_no_weights(manifest: EngineManifest, built: BuiltEngine) -> None:
    """Every weight is bound by name; the files could not hold them (the embedding alone is 100 kB of floats)."""
    own = load_file(built.directory / CONSTANTS_FILE)
    assert Package(built.directory / PACKAGE_DIRECTORY).constants == manifest.constants.keys() | own.keys()
    stored = [entry for entry in manifest.files if not entry.path.endswith((".so", ".cpp"))]
    assert sum(entry.size for entry in stored) < 50_000


def test_a_sound_engine_is_verified(built: BuiltEngine, manifest: EngineManifest, weights: Path) -> None:
    verify_engine(built, reexported(manifest), weights)


@pytest.mark.parametrize("change", [{"rms_norm_eps": 0.1}, {"rope_parameters": {"rope_type": "default", "rope_theta": 2.0}}])
def test_an_engine_that_computes_something_else_is_refused(
    built: BuiltEngine, manifest: EngineManifest, weights: Path, change: dict[str, object]
) -> None:
    with pytest.raises(BuildFailed, match=r"profile \w+ with batch \d+ and query length \d+: logits have cosine"):
        verify_engine(built, reexported(manifest, **change), weights)


def test_a_profile_that_does_not_run_at_one_of_its_sizes_is_named(
    built: BuiltEngine, manifest: EngineManifest, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BR-024: the largest prefill runs, the smallest does not."""
    run = BoundPackage.run

    def needs_four_tokens(self: BoundPackage, inputs: list[Tensor]) -> Tensor:
        if 1 < inputs[0].shape[1] < 4:
            raise RuntimeError("window needs 4 tokens")
        return run(self, inputs)

    monkeypatch.setattr(BoundPackage, "run", needs_four_tokens)
    decode, prefill = manifest.profiles.profiles
    narrow = replace(prefill, query_len=replace(prefill.query_len, min=2))
    exported = replace(reexported(manifest), profiles=replace(manifest.profiles, profiles=(decode, narrow)))
    with pytest.raises(BuildFailed, match="profile prefill does not run with batch 1 and query length 2: window needs 4 tokens"):
        verify_engine(built, exported, weights)


def sound_package(program: DecoderProgram) -> SimpleNamespace:
    """What Inductor should make of a program, as `Package` reports it."""
    uses = tuple(
        PoolUse(f"arg{layer}_1", program.cache.layout.page_dim, group.window) for layer, group in program.cache.iter_layers()
    )
    return SimpleNamespace(pool_uses=uses, constants=frozenset(program.weights) | frozenset(program.constants))


def test_packages_are_compared_with_their_program(exported: Export) -> None:
    program = exported("gemma3", Layout.PAGED)
    sound = sound_package(program)
    check_package(sound, program)
    head, *rest = sound.pool_uses
    weight = next(iter(program.weights))
    unsound = {
        "3 pools written in place expected; got 2": {"pool_uses": (replace(head, pool="buf3"), *rest)},
        "pools of": {"pool_uses": (replace(head, window=None), *rest)},
        f"baked 1 weights into the code .{weight}": {"constants": sound.constants - {weight}},
        "wants 1 constants the program does not have .constant7": {"constants": sound.constants | {"constant7"}},
    }
    for message, change in unsound.items():
        with pytest.raises(BuildFailed, match=message):
            check_package(SimpleNamespace(**{**vars(sound), **change}), program)


def test_a_program_inductor_cannot_compile_is_a_failed_build(
    exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("C++ compile error")

    monkeypatch.setattr("compiler_service.backends.inductor.build.aoti_compile_and_package", broken)
    with pytest.raises(BuildFailed, match=r"could not compile the program: C\+\+ compile error"):
        build_engine(exported("llama", Layout.PAGED), host_target(), tmp_path)


@pytest.mark.slow
def test_a_bfloat16_engine_is_built_and_verified() -> None:
    """The build itself compares the engine with the eager export at every profile's sizes; Qwen 3, over pages."""
    tiny = tiny_engine("qwen3", Layout.PAGED, "bfloat16")
    manifest = decode_engine_manifest(tiny.store.manifest(tiny.engine_id))
    assert {binding.dtype for binding in manifest.bindings if binding.name.startswith("kv_pool")} == {"bfloat16"}
    assert manifest.model.weights_dtype == "bfloat16"
