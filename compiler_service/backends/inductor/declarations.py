"""Keeps Inductor's C++ from naming arrays that it has not declared.

Its wrapper writes each array of sizes once a text buffer, and knows a buffer by its address (CppWrapperCpu.codegen_int_array_var,
torch 2.11 to 2.14; pytorch/pytorch#193621). Where a short-lived buffer is freed and the next one lies at its address, the next is
taken for the first, its arrays for declared, and now and then a package of extern calls does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu


@contextmanager
def buffers_kept() -> Iterator[None]:
    """Within it no buffer that arrays were written to is freed, so no address is another's."""
    original = CppWrapperCpu.codegen_int_array_var
    kept: list[Callable[..., None]] = []

    def keeping(self: CppWrapperCpu, int_array: str, writeline: Callable[..., None], *arguments: Any, **options: Any) -> str:
        kept.append(writeline)  # a bound method, which holds its buffer
        return str(original(self, int_array, writeline, *arguments, **options))

    CppWrapperCpu.codegen_int_array_var = keeping  # type: ignore[method-assign]  # for as long as the context is entered
    try:
        yield
    finally:
        CppWrapperCpu.codegen_int_array_var = original  # type: ignore[method-assign]
