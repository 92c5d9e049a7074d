"""Arrays of sizes are declared in every buffer that names them, also where a buffer lies where an earlier one has lain."""

from __future__ import annotations

import itertools

import pytest
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.utils import IndentedBuffer

from compiler_service.backends.inductor.declarations import buffers_kept


def undeclared(monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a hundred short-lived buffers, those that name an array nobody declared there."""
    names = itertools.count()

    def declare(self: CppWrapperCpu, int_array: str, writeline: object, known_statically: bool) -> str:
        name = f"int_array_{next(names)}"
        writeline(f"int64_t {name}[] = {int_array};")  # type: ignore[operator]
        return name

    monkeypatch.setattr(CppWrapperCpu, "_codegen_int_array_var_impl", declare)
    wrapper = object.__new__(CppWrapperCpu)
    wrapper.codegen_int_array_var_cache = {}
    missing = 0
    for _ in range(100):
        buffer = IndentedBuffer()
        name = wrapper.codegen_int_array_var("{2L, 3L}", buffer.writeline, known_statically=True)
        missing += f" {name}[]" not in buffer.getvalue()
        del buffer
    return missing


def test_no_buffer_names_what_another_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert undeclared(monkeypatch) > 0, "torch declares them itself by now: declarations.py can go"
    original = CppWrapperCpu.codegen_int_array_var
    with buffers_kept():
        assert undeclared(monkeypatch) == 0
    assert CppWrapperCpu.codegen_int_array_var is original
