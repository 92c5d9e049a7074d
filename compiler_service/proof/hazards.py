"""What a write in place would change besides the cells it writes.

A functional graph has the old and the new content side by side; memory has one. So nobody but the write may read the old
content (on a GPU such a reader got the new one, silently), and somebody must read the new one.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from compiler_service.proof import rules
from compiler_service.proof.evaluate import bind
from compiler_service.proof.program import CacheNodes, Program
from compiler_service.proof.verdict import Refuted
from compiler_service.proof.writes import Write, destination_of

_VIEWS = rules.WHOLE_VIEWS | rules.SLICES


def old_readers(cache: CacheNodes, write: Write) -> Iterator[fx.Node]:
    """Nodes that read the content of the cache from before the write, and are not the write."""
    pending, seen = [cache.old], {cache.old}
    while pending:
        view = pending.pop()
        for user in view.users:
            if user.op == "output" and _returned(user, view):
                yield user
            if user in seen or user.op == "output" or _ignores_content(user, view, write):
                continue
            seen.add(user)
            if str(user.target) in _VIEWS:
                pending.append(user)
            else:
                yield user


def _ignores_content(user: fx.Node, view: fx.Node, write: Write) -> bool:
    """Whether `user` takes `view` only to look at its shape, or to write there."""
    if str(user.target) in rules.METADATA:
        return True
    if user not in write.path and str(user.target) != rules.COPY:
        return False
    operands = [item for value in bind(user).values() for item in (value if isinstance(value, list | tuple) else (value,))]
    return destination_of(user) is view and sum(operand is view for operand in operands) == 1


def new_readers(write: Write) -> list[fx.Node]:
    """Nodes that read the content after the write."""
    return [user for content in write.contents for user in content.users if user.op != "output" and user not in write.contents]


def find_hazard(program: Program, name: str, cache: CacheNodes, write: Write) -> Refuted | None:
    """The first reason why `name` must not be written in place, or None."""
    for reader in old_readers(cache, write):
        told = f"{reader.name} reads {name} as it was before the write; in place it would read the new content"
        return Refuted(told, reader.name)
    if not new_readers(write) and not set(write.contents).intersection(program.outputs):
        return Refuted(f"nothing reads {name} after the write: its attention uses something else", write.node.name)
    return None


def _returned(output: fx.Node, node: fx.Node) -> bool:
    returned = output.args[0]
    return isinstance(returned, list | tuple) and node in returned
