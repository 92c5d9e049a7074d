"""What the runtime uses of TensorRT, as types: the library ships none. Either flavour has these names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class RuntimeConfig(Protocol):
    """IRuntimeConfig: how execution contexts are made. What has to do with a runtime cache is the RTX flavour's alone."""

    dynamic_shapes_kernel_specialization_strategy: object

    def set_execution_context_allocation_strategy(self, strategy: object) -> None: ...

    def create_runtime_cache(self) -> object: ...

    def set_runtime_cache(self, cache: object) -> None: ...


class ExecutionContext(Protocol):
    """IExecutionContext. Addresses are of device memory; what is answered False was refused; the library's log has the reason."""

    def set_device_memory(self, address: int, size: int) -> None: ...

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool: ...

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def set_tensor_address(self, name: str, address: int) -> bool: ...

    def execute_async_v3(self, stream: int) -> bool: ...


class Plan(Protocol):
    """ICudaEngine: a plan, deserialized."""

    @property
    def num_io_tensors(self) -> int: ...

    @property
    def num_optimization_profiles(self) -> int: ...

    @property
    def device_memory_size_v2(self) -> int: ...

    def get_tensor_name(self, index: int) -> str: ...

    def get_tensor_mode(self, name: str) -> object: ...

    def get_tensor_shape(self, name: str) -> Sequence[int]: ...

    def get_tensor_dtype(self, name: str) -> object: ...

    def get_tensor_profile_shape(self, name: str, profile: int) -> Sequence[Sequence[int]]:
        """The least, the usual and the largest shape of an input under a profile."""
        ...

    def get_aliased_input_tensor(self, name: str) -> str | None:
        """The input that an output shares its memory with; None or empty where it has memory of its own."""
        ...

    def create_runtime_config(self) -> RuntimeConfig: ...

    def create_execution_context(self, config: RuntimeConfig) -> ExecutionContext | None:
        """None where it cannot be made; the library's log has the reason."""
        ...
