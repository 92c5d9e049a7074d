"""The number a `Linear` of the index algebra stands for in one execution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from compiler_service.proof.algebra import ROW, Linear, Term


def value_of(linear: Linear, *, row: int, sizes: Mapping[str, int], values: Mapping[str, Any]) -> int | None:
    """`linear` in row `row`, with the sizes and node values of the execution; None where it names something inside a node."""
    total = linear.const
    for term, factor in linear.terms:
        found = _term(term, row, sizes, values)
        if found is None:
            return None
        total += factor * found
    return total


def _term(term: Term, row: int, sizes: Mapping[str, int], values: Mapping[str, Any]) -> int | None:
    if term.symbol:
        return sizes.get(term.source)
    place = []
    for coord in term.index:
        offset = value_of(coord.offset, row=row, sizes=sizes, values=values)
        if offset is None:
            return None
        place.append(offset if coord.axis is None else row + offset)
    if term.source == ROW:
        return place[0]
    value = values.get(term.source)
    if value is None:
        return None
    return int(value[tuple(place)]) if isinstance(value, Tensor) else int(value)
