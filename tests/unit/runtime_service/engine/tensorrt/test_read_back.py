"""A plan is believed only where it says of itself what its manifest says. The plan here is the test's own; no GPU is needed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from runtime_service.engine.tensorrt.read_back import check_plan
from shared.bindings import AliasedBinding, BindingSpec, Role
from shared.errors import EngineIncompatible
from shared.kv_spec import Layout
from shared.manifest import Target
from tests.support.tiny_engine import TinyModel, tiny_manifest

TRT = SimpleNamespace(
    TensorIOMode=SimpleNamespace(INPUT="in", OUTPUT="out"),
    float32="f32",
    float16="f16",
    bfloat16="bf16",
    int32="i32",
    int64="i64",
)
BINDINGS = (
    BindingSpec("input_ids", Role.INPUT, "int32", (None, None)),
    BindingSpec("w", Role.WEIGHT, "float32", (4, 8)),
    BindingSpec("k_cache.0", Role.CACHE, "float32", (None, 2, 64, 8)),
    BindingSpec("k_cache.0.updated", Role.CACHE, "float32", (None, 2, 64, 8)),
    BindingSpec("logits", Role.OUTPUT, "float32", (None, 251)),
)
MANIFEST = replace(
    tiny_manifest(TinyModel().spec(Layout.LINEAR, 64, 64), ("decode=8x1", "prefill=2x16"), (1,)),
    bindings=BINDINGS,
    aliases=(AliasedBinding("k_cache.0", "k_cache.0.updated"),),
    backend="tensorrt_rtx",
    target=Target("cuda", (), ("sm80",)),
    toolchain={"tensorrt_rtx": "1.6.1"},
)


@dataclass
class Plan:
    """What ICudaEngine answers for `MANIFEST`."""

    shapes: dict[str, tuple[int, ...]] = field(
        default_factory=lambda: {
            "input_ids": (-1, -1),
            "w": (4, 8),
            "k_cache.0": (-1, 2, 64, 8),
            "logits": (-1, 251),
            "k_cache.0.updated": (-1, 2, 64, 8),
        }
    )
    dtypes: dict[str, str] = field(default_factory=lambda: {"input_ids": "i32"})
    aliases: dict[str, str] = field(default_factory=lambda: {"k_cache.0.updated": "k_cache.0"})
    profiles: tuple[Any, ...] = (((1, 1), (8, 1), (8, 1)), ((1, 1), (2, 16), (2, 16)))

    @property
    def num_io_tensors(self) -> int:
        return len(self.shapes)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self.shapes)[index]

    def get_tensor_mode(self, name: str) -> str:
        return "out" if name in ("logits", "k_cache.0.updated") else "in"

    def get_tensor_dtype(self, name: str) -> str:
        return self.dtypes.get(name, "f32")

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def get_tensor_profile_shape(self, name: str, index: int) -> Any:
        assert name == "input_ids"
        return self.profiles[index]


def test_the_plan_of_the_manifest_is_accepted() -> None:
    check_plan(TRT, Plan(), MANIFEST)


def test_a_size_that_every_profile_fixes_may_be_fixed_in_the_plan() -> None:
    check_plan(TRT, Plan(shapes=Plan().shapes | {"input_ids": (1, -1)}), MANIFEST)


@pytest.mark.parametrize(
    ("field_name", "plan"),
    [
        ("aliases", Plan(aliases={})),
        ("aliases", Plan(aliases={"k_cache.0.updated": "w"})),
        ("bindings", Plan(shapes={name: shape for name, shape in Plan().shapes.items() if name != "w"})),
        ("bindings.w", Plan(shapes=Plan().shapes | {"w": (8, 4)})),
        ("bindings.k_cache.0", Plan(shapes=Plan().shapes | {"k_cache.0": (-1, 2, 32, 8)})),
        ("bindings.w", Plan(shapes=Plan().shapes | {"w": (4, 8, 1)})),
        ("bindings.logits", Plan(dtypes={"input_ids": "i32", "logits": "bf16"})),
        ("profiles", Plan(profiles=Plan().profiles[:1])),
        ("profiles.decode", Plan(profiles=Plan().profiles[::-1])),
    ],
)
def test_a_plan_that_differs_is_refused_by_field(field_name: str, plan: Plan) -> None:
    with pytest.raises(EngineIncompatible) as caught:
        check_plan(TRT, plan, MANIFEST)
    assert caught.value.details["field"] == field_name
    assert caught.value.details["expected"] != caught.value.details["got"]
