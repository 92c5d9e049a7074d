"""What a deserialized plan says of itself, compared with the manifest that came with it."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from runtime_service.engine.tensorrt.api import Plan
from shared.bindings import INPUT_IDS, Role
from shared.errors import EngineIncompatible
from shared.manifest import EngineManifest
from shared.profiles import Range


def check_plan(trt: ModuleType, plan: Plan, manifest: EngineManifest) -> None:
    """EngineIncompatible, naming the field, unless bindings, aliases and profiles of `plan` are the manifest's."""
    names = [plan.get_tensor_name(index) for index in range(plan.num_io_tensors)]
    _require("bindings", sorted(binding.name for binding in manifest.bindings), sorted(names))
    outputs = [name for name in names if plan.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT]
    aliases = {name: source for name in outputs if (source := plan.get_aliased_input_tensor(name))}
    _require("aliases", {alias.output: alias.input for alias in manifest.aliases}, aliases)
    for binding in manifest.bindings:
        is_output = binding.role is Role.OUTPUT or binding.name in aliases
        expected = (is_output, binding.dtype, binding.shape)
        shape = _stated(binding.shape, plan.get_tensor_shape(binding.name))
        got = (binding.name in outputs, _dtype(trt, plan.get_tensor_dtype(binding.name)), shape)
        _require(f"bindings.{binding.name}", expected, got)
    _require("profiles", len(manifest.profiles.profiles), plan.num_optimization_profiles)
    for index, profile in enumerate(manifest.profiles.profiles):
        least, usual, largest = plan.get_tensor_profile_shape(INPUT_IDS, index)
        ranges = tuple(Range(*sizes) for sizes in zip(least, usual, largest, strict=True))
        _require(f"profiles.{profile.name}", (profile.batch, profile.query_len), ranges)


def _stated(expected: Sequence[int | None], got: Sequence[int]) -> tuple[int | None, ...]:
    """`got` without the sizes `expected` leaves open: the builder fixes those that all profiles fix, and knows more of outputs."""
    if len(expected) != len(got):
        return tuple(got)
    return tuple(None if wanted is None else size for wanted, size in zip(expected, got, strict=True))


def _dtype(trt: ModuleType, dtype: object) -> str:
    names = {trt.float32: "float32", trt.float16: "float16", trt.bfloat16: "bfloat16", trt.int32: "int32", trt.int64: "int64"}
    return names.get(dtype, str(dtype))


def _require(field: str, expected: object, got: object) -> None:
    if expected != got:
        raise EngineIncompatible(
            f"{field}: the manifest states {expected}, the plan has {got}; the artifact is not what it says: compile it again",
            details={"field": field, "expected": str(expected), "got": str(got)},
        )
