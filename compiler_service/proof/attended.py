"""A proven attention read in full: not only that it follows its write, but every cell each query sees, so that another operator
can take its place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from compiler_service.proof import rules
from compiler_service.proof.attention import Attention
from compiler_service.proof.consistency import Seen, find_readers, read_conditions
from compiler_service.proof.evaluate import Values, bind
from compiler_service.proof.program import CacheDecl, Program, read_program
from compiler_service.proof.verdict import Proved, Run
from compiler_service.proof.writes import Write, read_write
from shared.errors import UnsupportedModel

_OTHERWISE = "compile the checkpoint it was exported from, or build it for tensorrt_rtx, which takes attention as it comes"


@dataclass(frozen=True, slots=True)
class SeenCells:
    """Query `i` of a row sees the cells up to `start + i`, and of those the newest `window` (None: all). `node` attends."""

    node: str
    window: int | None


def read_attention(exported: ExportedProgram, caches: Mapping[str, CacheDecl]) -> dict[int, SeenCells]:
    """What the one attention over each layer sees, by layer, in a functional program whose writes are proven.

    UnsupportedModel, naming the node, where it is no scaled_dot_product_attention over the layer's heads by such a rule.
    """
    program = read_program(exported, caches)
    values = Values(program)
    writes = {name: read_write(values, name, cache) for name, cache in program.caches.items()}
    readers = find_readers(writes)
    seen: dict[int, SeenCells] = {}
    for name, write in writes.items():
        assert isinstance(write.verdict, Proved)
        attention = _only_attention(name, readers.over[name])
        _require_repeated_heads(name, write, attention)
        cells = SeenCells(attention.node.name, _window(program, values, attention, write.verdict.run))
        layer = program.caches[name].decl.layer
        if seen.setdefault(layer, cells) != cells:
            raise UnsupportedModel(
                f"keys and values of layer {layer} are read by {seen[layer].node} and {cells.node}: {_OTHERWISE}"
            )
    return seen


def _only_attention(cache: str, found: Sequence[Attention]) -> Attention:
    if len(found) != 1 or str(found[0].node.target) not in rules.SDPA or bind(found[0].node).get("dropout_p"):
        readers = ", ".join(f"{attention.node.name} ({attention.node.target})" for attention in found) or "none"
        raise UnsupportedModel(
            f"{cache} must be read by one scaled_dot_product_attention without dropout; its attentions are {readers}. Export the "
            f"model with attn_implementation='sdpa', {_OTHERWISE}"
        )
    return found[0]


def _window(program: Program, values: Values, attention: Attention, run: Run) -> int | None:
    conditions = read_conditions(program, values, attention, run)
    node = attention.node.name
    if not isinstance(conditions, list) or Seen(up_to_own=True) not in conditions:
        raise UnsupportedModel(f"{node} does not see exactly the cells up to each query's own: {_OTHERWISE}")
    if chunks := [seen.chunk for seen in conditions if seen.chunk is not None]:
        raise UnsupportedModel(f"{node} sees the cells of its own chunk of {chunks[0]} alone: {_OTHERWISE}")
    return min((seen.newest for seen in conditions if seen.newest is not None), default=None)


def _require_repeated_heads(cache: str, write: Write, attention: Attention) -> None:
    """UnsupportedModel unless the attention reads the written cache itself, each head as many times as there are query heads to it.

    Whatever moves elements without looking at them does to their numbers what it does to them: so it is done to their numbers.
    """
    arguments = bind(attention.node)
    operand = arguments["key" if attention.is_keys else "value"]
    assert isinstance(operand, fx.Node)
    held = write.node.meta["val"]
    heads, query_heads = held.shape[1], attention.queries.meta["val"].shape[1]
    group = 1 if arguments.get("enable_gqa") else query_heads // heads
    sizes = list(held.shape)
    if all(isinstance(size, int) for size in sizes):
        numbers = torch.arange(held.numel()).view(sizes)
        wanted = numbers.repeat_interleave(group, 1)
        read = _moved(operand, write.contents, numbers)
        if read is not None and read.shape[1] == 1:  # the operator itself repeats the one head
            read = read.expand(-1, wanted.shape[1], -1, -1)
        if read is not None and operand.meta["val"].dtype is held.dtype and torch.equal(read, wanted):
            return
    raise UnsupportedModel(
        f"{attention.node.name} reads {cache} through {operand.name}, which is more than its heads repeated: {_OTHERWISE}"
    )


def _moved(node: fx.Node, contents: Collection[fx.Node], numbers: Tensor) -> Tensor | None:
    """What `node` makes of `numbers` in the place of the cache's content; None where it is not made by moving it."""
    if node in contents:
        return numbers
    source = bind(node).get("self") if node.op == "call_function" else None
    if str(node.target) not in rules.LAYOUT or node.all_input_nodes != [source]:
        return None
    assert isinstance(source, fx.Node)
    inner = _moved(source, contents, numbers)
    if inner is None:
        return None
    moved: Tensor = node.target(inner, *node.args[1:], **node.kwargs)  # type: ignore[operator]  # an operator: LAYOUT names those
    return moved
