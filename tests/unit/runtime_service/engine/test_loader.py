"""An engine that does not fit this host, these libraries or its own manifest is refused by name, before anything runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runtime_service.engine import loader as loader_module
from runtime_service.engine.host import check_host
from runtime_service.engine.loader import EngineLoader, check_package
from shared.errors import ArtifactCorrupt, EngineIncompatible, MemoryExhausted
from shared.inductor.files import PACKAGE_DIRECTORY
from shared.inductor.package import Package
from shared.kv_spec import Layout
from shared.manifest import EngineManifest, Target, decode_engine_manifest, encode_manifest
from shared.tensorrt.files import PLAN_FILE
from tests.support.engines import TinyEngine, tiny_engine


@pytest.fixture(scope="module")
def tiny() -> TinyEngine:
    return tiny_engine("llama", Layout.LINEAR)


@pytest.fixture(scope="module")
def manifest(tiny: TinyEngine) -> EngineManifest:
    return decode_engine_manifest(tiny.store.manifest(tiny.engine_id))


@pytest.fixture
def package_copy(tiny: TinyEngine, tmp_path: Path) -> Path:
    with tiny.store.open(tiny.engine_id) as handle:
        return Path(shutil.copytree(handle.path(f"{PACKAGE_DIRECTORY}/archive_format").parent, tmp_path / "package"))


def edit_second_call(package: Path, argument: str, value: dict[str, Any]) -> None:
    """Replace an argument of layer 1's attention in the package's list of external calls."""
    (path,) = package.rglob("*.wrapper.json")
    calls = json.loads(path.read_text())
    _, second = [entry["node"] for entry in calls["nodes"] if entry["node"]["target"] == "quire::paged_attend"]
    for given in second["inputs"]:
        if given["name"] == argument:
            given["arg"] = value
    path.write_text(json.dumps(calls))


def test_this_very_engine_is_accepted(tiny: TinyEngine, manifest: EngineManifest, package_copy: Path) -> None:
    check_host(manifest)
    check_package(manifest, Package(package_copy))


UNFIT: dict[str, Callable[[EngineManifest], EngineManifest]] = {
    "backend": lambda m: replace(m, backend="abacus"),
    "target.device": lambda m: replace(m, target=Target("cuda", (), ("sm90",))),
    "target.isa": lambda m: replace(m, target=Target("cpu", (*m.target.isa, "avx1024"), ())),
    "toolchain.torch": lambda m: replace(m, toolchain={**m.toolchain, "torch": "2.0.0"}),
    "toolchain.ops": lambda m: replace(m, toolchain={k: v for k, v in m.toolchain.items() if k != "ops"}),
}


@pytest.mark.parametrize("field", UNFIT)
def test_an_engine_for_elsewhere_is_refused_before_its_code_is_mapped(
    tiny: TinyEngine, manifest: EngineManifest, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BR-147: versions compared are those of the loaded libraries. Both sides are named."""

    def no_mapping(_: Path) -> Package:
        raise AssertionError("native code was mapped")

    monkeypatch.setattr("runtime_service.engine.loader.Package", no_mapping)
    handle = tiny.store.open(tiny.engine_id)
    handle.manifest_bytes = encode_manifest(UNFIT[field](manifest))
    with pytest.raises(EngineIncompatible, match=field.replace(".", r"\.")) as caught:
        EngineLoader().load(handle, tiny.store.open(tiny.model_id))
    assert caught.value.details["field"] == field
    assert caught.value.details["expected"] != caught.value.details["got"]


def test_the_weights_of_another_model_are_refused(tiny: TinyEngine, manifest: EngineManifest) -> None:
    handle = tiny.store.open(tiny.engine_id)
    handle.manifest_bytes = encode_manifest(replace(manifest, model=replace(manifest.model, model_id="0" * 64)))
    with pytest.raises(EngineIncompatible, match="model: the engine needs 0000"):
        EngineLoader().load(handle, tiny.store.open(tiny.model_id))


def test_weights_the_model_does_not_have_are_refused(tiny: TinyEngine, manifest: EngineManifest) -> None:
    constant = next(iter(manifest.constants))
    handle = tiny.store.open(tiny.engine_id)
    handle.manifest_bytes = encode_manifest(replace(manifest, constants={**manifest.constants, constant: "model.layers.9.weight"}))
    with pytest.raises(EngineIncompatible, match=r"model\.layers\.9\.weight"):
        EngineLoader().load(handle, tiny.store.open(tiny.model_id))


def test_a_constant_left_out_is_refused_instead_of_run(tiny: TinyEngine, manifest: EngineManifest) -> None:
    """Running before every constant is set is a segmentation fault in libtorch."""
    fewer = dict(list(manifest.constants.items())[1:])
    handle = tiny.store.open(tiny.engine_id)
    handle.manifest_bytes = encode_manifest(replace(manifest, constants=fewer))
    with pytest.raises(EngineIncompatible, match="constants") as caught:
        EngineLoader().load(handle, tiny.store.open(tiny.model_id))
    assert caught.value.details["field"] == "constants"


def test_an_alias_between_two_pools_is_refused(tiny: TinyEngine, manifest: EngineManifest) -> None:
    """BR-008: an alias map that sends one layer's writes to another's pool."""
    swapped = tuple(replace(alias, output="kv_pool.1") if alias.input == "kv_pool.0" else alias for alias in manifest.aliases)
    handle = tiny.store.open(tiny.engine_id)
    handle.manifest_bytes = encode_manifest(replace(manifest, aliases=swapped))
    with pytest.raises(EngineIncompatible, match="aliases"):
        EngineLoader().load(handle, tiny.store.open(tiny.model_id))


OTHER_CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a copy of the pool": ("pool", {"as_tensor": {"name": "buf7"}}, "aliases"),
    "another layout": ("page_dim", {"as_int": 0}, "cache"),
    "a window": ("window", {"as_int": 5}, "cache"),
}


@pytest.mark.parametrize(("argument", "value", "field"), OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_a_package_that_is_not_what_its_manifest_says_is_refused(
    manifest: EngineManifest, package_copy: Path, argument: str, value: dict[str, Any], field: str
) -> None:
    edit_second_call(package_copy, argument, value)
    with pytest.raises(EngineIncompatible) as caught:
        check_package(manifest, Package(package_copy))
    assert caught.value.details["field"] == field


def test_two_layers_on_one_pool_are_refused(manifest: EngineManifest, package_copy: Path) -> None:
    first = Package(package_copy).pool_uses[0].pool
    edit_second_call(package_copy, "pool", {"as_tensor": {"name": first}})
    with pytest.raises(EngineIncompatible, match="2 pools written in place, here is 1;"):
        check_package(manifest, Package(package_copy))


def test_an_instruction_set_the_manifest_does_not_name_is_refused(manifest: EngineManifest, package_copy: Path) -> None:
    other = replace(manifest, toolchain={**manifest.toolchain, "cpu_isa": "AVX1024"})
    with pytest.raises(EngineIncompatible, match=r"toolchain\.cpu_isa: the engine needs AVX1024"):
        check_package(other, Package(package_copy))


def test_a_gpu_without_room_is_a_typed_refusal(tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in the load the memory runs out, the artifacts are given back."""

    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(loader_module, "check_package", no_room)
    engine = tiny.store.open(tiny.engine_id)
    with pytest.raises(MemoryExhausted, match="no room for the engine and its weights: tried to allocate 20 GiB"):
        EngineLoader().load(engine, tiny.store.open(tiny.model_id))


def test_older_releases_of_torch_open_a_package_all_the_same(tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 2.12 they read archives alone: one is packed and thrown away."""
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with tiny.store.open(tiny.engine_id) as handle:
        directory = handle.path(f"{PACKAGE_DIRECTORY}/archive_format").parent
        packed = Package(directory)
        monkeypatch.undo()
        assert (packed.constants, packed.pool_uses) == (Package(directory).constants, Package(directory).pool_uses)


def test_a_directory_without_a_package_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(ArtifactCorrupt, match="AOTInductor package"):
        Package(tmp_path)


@pytest.mark.parametrize(
    "constants", [{}, {"model.embed_tokens.weight": "model.embed_tokens.weight"}], ids=["in the plan", "shared"]
)
def test_a_plan_that_holds_its_weights_is_bound_to_none(
    tiny: TinyEngine, manifest: EngineManifest, constants: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's file is not even read for it: its weights would lie on the GPU twice."""
    bound: list[set[str]] = []
    loaded: list[str] = []

    def load_plan(manifest: EngineManifest, plan: Path, weights: Mapping[str, torch.Tensor]) -> object:
        bound.append(set(weights))
        return object()

    def on_device(file: Path, device: str) -> dict[str, torch.Tensor]:
        loaded.append(device)
        return load_file(file)

    monkeypatch.setattr(loader_module, "check_host", lambda _: None)
    monkeypatch.setattr(loader_module, "load_plan", load_plan)
    monkeypatch.setattr(loader_module, "find_plan_faults", lambda *_: [])
    monkeypatch.setattr("runtime_service.engine.weights.require_room", lambda _: None)
    monkeypatch.setattr("runtime_service.engine.weights.load_file", on_device)
    handle = tiny.store.open(tiny.engine_id)
    stored = type(handle).path
    monkeypatch.setattr(type(handle), "path", lambda self, name: Path(name) if name == PLAN_FILE else stored(self, name))
    handle.manifest_bytes = encode_manifest(replace(manifest, backend="tensorrt_rtx", constants=constants))
    EngineLoader().load(handle, tiny.store.open(tiny.model_id))
    assert bound == [set(constants)]
    assert loaded == ["cuda"] * len(constants)
