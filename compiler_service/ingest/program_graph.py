"""The graph of a `.pt2` archive as an ExportedProgram, read only after every text torch would resolve or evaluate is checked.

torch's reader looks up operators by name, evaluates expressions over sizes, imports what a tree names and compiles guards. So
operators are confined to the namespaces a decoder uses, expressions to numbers, symbols and functions of sizes, trees to lists,
tuples and dicts; guards, sample inputs and notes on nodes are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._export.serde import schema
from torch._export.serde.serialize import ExportedProgramDeserializer, SerializeError, _dict_to_dataclass
from torch._export.verifier import SpecViolationError
from torch.export import ExportedProgram

from compiler_service.ingest.program_archive import Payload, ProgramArchive
from shared.errors import SourceInvalid, UnsafeSource, UnsupportedModel
from shared.kernels.attention.ops import load_ops

_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|quire)\.\w+\.\w+"
    r"|torch\.ops\.higher_order\.(wrap_with_set_grad_enabled|wrap_with_autocast)"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|neg|pos|pow|eq|ne|lt|le|gt|ge|and_|or_|getitem)"
    r"|torch\.sym_(int|float|max|min|not|ite|sum)"
    r"|math\.(ceil|floor|trunc)"
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_SYMBOL = re.compile(r"Symbol\('[suz]\d+'(, (positive|nonnegative|integer|real)=True)*\)")
_SIZE_WORDS = frozenset(
    [
        "Integer",
        "Add",
        "Mul",
        "Pow",
        "true",
        "false",
        "FloorDiv",
        "ModularIndexing",
        "Where",
        "PythonMod",
        "Mod",
        "CleanDiv",
        "CeilToInt",
        "FloorToInt",
        "CeilDiv",
        "PowByNatural",
        "IntTrueDiv",
        "TruncToInt",
        "RoundToInt",
        "ToFloat",
        "Max",
        "Min",
        "Equality",
        "Unequality",
        "StrictLessThan",
        "LessThan",
        "StrictGreaterThan",
        "GreaterThan",
        "And",
        "Or",
        "Not",
        "Identity",
    ]
)
_SIZE_TEXT = re.compile(r"[\w\s+\-*(),]*")
_TREES = frozenset({None, "builtins.list", "builtins.tuple", "builtins.dict"})
_MOST_NODES = 1 << 20
_HOSTILE = (
    SerializeError,
    SpecViolationError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    RuntimeError,
    IndexError,
    RecursionError,
)
"""What torch raises on an archive that is not what it writes itself."""


def read_program(archive: ProgramArchive) -> ExportedProgram:
    """The program of `archive`, its tensors mapped from the file.

    UnsafeSource names a text that could run code, UnsupportedModel an operator from elsewhere, SourceInvalid what is no program.
    """
    load_ops()
    fields = _confined(archive.graph)
    parameters, constants = _by_place(archive.payloads, fields)
    with readable(archive.path.name):
        graph = _dict_to_dataclass(schema.ExportedProgram, fields)  # type: ignore[no-untyped-call]  # torch leaves it so
        return ExportedProgramDeserializer().deserialize(graph, parameters, constants, None)


@contextmanager
def readable(name: str) -> Iterator[None]:
    """SourceInvalid for whatever torch, or our own reading, makes of an archive that torch has not written."""
    try:
        yield
    except _HOSTILE as error:
        raise SourceInvalid(f"{name} holds no program this torch ({torch.__version__}) reads: {error}") from error


def _confined(graph: dict[str, Any]) -> dict[str, Any]:
    """`graph` without what nobody needs, once all that is left has been checked."""
    module = graph.get("graph_module")
    if not isinstance(module, dict) or not isinstance(module.get("module_call_graph"), list):
        raise SourceInvalid("the archive's graph has no graph_module with a module_call_graph")
    root = [call for call in module["module_call_graph"] if isinstance(call, dict) and call.get("fqn") == ""]
    module = module | {"module_call_graph": root, "metadata": {}, "treespec_namedtuple_fields": {}}
    confined = graph | {"graph_module": module, "guards_code": []}
    for count, part in enumerate(_objects(confined)):
        if count > _MOST_NODES:
            raise SourceInvalid(f"a program's graph must have at most {_MOST_NODES} parts")
        _check(part)
    return confined


def _check(part: dict[str, Any]) -> None:
    if "target" in part and "outputs" in part:
        part["metadata"] = {}
        _check_operator(part["target"])
    if "as_operator" in part:
        _check_operator(part["as_operator"])
    if "as_custom_obj" in part or "custom_obj" in part:
        raise UnsafeSource("the program holds a custom object, which runs code when it is read")
    if "expr_str" in part:
        _check_expression(part["expr_str"])
    for name in ("in_spec", "out_spec"):
        if name in part:
            _check_tree(part[name])


def _check_operator(target: object) -> None:
    if not isinstance(target, str) or not _OPERATOR.fullmatch(target):
        raise UnsupportedModel(f"the program calls {str(target)[:120]!r}; only operators of aten, prims and quire are read")


def _check_expression(text: object) -> None:
    """torch evaluates it as Python."""
    rest = _SYMBOL.sub("0", text) if isinstance(text, str) and len(text) < 4096 else "?"
    if not _SIZE_TEXT.fullmatch(rest) or not _SIZE_WORDS.issuperset(_NAME.findall(rest)):
        raise UnsafeSource(f"a size of the program is {str(text)[:120]!r}, which is no expression over sizes")


def _check_tree(text: object) -> None:
    try:
        kinds = {part.get("type") for part in _objects(json.loads(str(text))) if "children_spec" in part}
    except ValueError as error:
        raise SourceInvalid(f"a tree of the program is no JSON: {error}") from error
    if strange := kinds - _TREES:
        raise UnsafeSource(f"the program's inputs are packed in {', '.join(map(str, strange))}; lists, tuples and dicts are read")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object in `value`, itself included."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending += part.values()
        elif isinstance(part, list):
            pending += part


def _by_place(payloads: Mapping[str, Payload], graph: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(state dict, constants): buffers that are not persistent and lifted tensors are constants to torch."""
    persistent = {
        part["buffer_name"] for part in _objects(graph) if isinstance(part.get("buffer_name"), str) and part.get("persistent")
    }
    state: dict[str, Tensor] = {}
    constants: dict[str, Tensor] = {}
    for name, payload in payloads.items():
        if payload.is_parameter:
            state[name] = torch.nn.Parameter(payload.tensor, requires_grad=False)
        elif name in persistent:
            state[name] = payload.tensor
        else:
            constants[name] = payload.tensor
    return state, constants
