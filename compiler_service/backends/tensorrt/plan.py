"""TensorRT's builder: a network, its profiles and its targets in, a serialized engine out, with progress on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorrt as trt
from torch_tensorrt.logging import TRT_LOGGER

from shared.errors import BuildFailed
from shared.tensorrt.precision import disable_tf32

Extent = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Builder:
    """One network and the plan made of it."""

    def __init__(self) -> None:
        disable_tf32()
        self._builder = trt.Builder(TRT_LOGGER)
        self._builder.max_threads = len(os.sched_getaffinity(0))
        # Engines of the RTX flavour are strongly typed without asking.
        flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        self.network: Any = self._builder.create_network(0 if flag is None else 1 << int(flag))

    def build(
        self, profiles: Sequence[Mapping[str, Extent]], targets: Sequence[str], progress: Callable[[float, str], None]
    ) -> bytes:
        """The plan, with `profiles` in this order, for the compute capabilities `targets`. BuildFailed when TensorRT gives none."""
        config = self._builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)
        config.progress_monitor = _Monitor(progress)
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            if not config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), index):
                raise BuildFailed(f"TensorRT does not accept the target {target}")
        for extents in profiles:
            profile = self._builder.create_optimization_profile()
            for name, extent in extents.items():
                profile.set_shape(name, *extent)
            if config.add_optimization_profile(profile) < 0:
                raise BuildFailed(f"TensorRT does not accept the profile {extents}")
        plan = self._builder.build_serialized_network(self.network, config)
        if plan is None:
            raise BuildFailed("TensorRT could not build the network; its errors are in the build's log")
        return bytes(plan)


class _Monitor(trt.IProgressMonitor):
    """Reports the outermost phase. Cancelling is ending the process: TensorRT's threads do not outlive it."""

    def __init__(self, progress: Callable[[float, str], None]) -> None:
        super().__init__()
        self._progress = progress
        self._steps: dict[str, int] = {}

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        if parent_phase is None:
            self._steps[phase_name] = num_steps

    def step_complete(self, phase_name: str, step: int) -> bool:
        if steps := self._steps.get(phase_name):
            self._progress(min(1.0, (step + 1) / steps), phase_name)
        return True

    def phase_finish(self, phase_name: str) -> None:
        self._steps.pop(phase_name, None)
