"""What a write in place would change besides the cells it writes.

A functional graph has the old and the new content side by side; memory has one. So nobody but the write may read the old
content (on a GPU such a reader got the new one, silently), one write a cache is all there can be, and two caches must not be
the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from compiler_service.proof import rules
from compiler_service.proof.evaluate import bind
from compiler_service.proof.program import CacheNodes, Program
from compiler_service.proof.verdict import Refuted
from compiler_service.proof.writes import Write

_VIEWS = rules.ALIASES | rules.AXIS_MOVES | rules.SLICES


def old_readers(cache: CacheNodes, write: Write) -> Iterator[fx.Node]:
    """Nodes that read the content of the cache from before the write, and are not the write."""
    pending, seen = [cache.old], {cache.old}
    while pending:
        view = pending.pop()
        for user in view.users:
            if user in seen or user in write.path:
                continue
            if user.op == "output":
                if _returned(user, view):
                    yield user
                continue
            seen.add(user)
            name = str(user.target)
            if name in rules.METADATA or (name == rules.COPY and bind(user)["src"] is not view):
                continue
            if name in _VIEWS:
                pending.append(user)
            else:
                yield user


def new_readers(cache: CacheNodes) -> list[fx.Node]:
    """Nodes that read the content after the write: users of the new value other than the write-back itself."""
    if cache.new is None:
        return []
    return [user for user in cache.new.users if user.op != "output"]


def find_hazard(program: Program, name: str, cache: CacheNodes, write: Write) -> Refuted | None:
    """The first reason why `name` must not be written in place, or None."""
    for reader in old_readers(cache, write):
        return Refuted(
            f"{reader.name} reads {name} as it was before the write; in place it would read the new content", reader.name
        )
    if cache.new is not None and not new_readers(cache) and cache.new not in program.outputs:
        return Refuted(f"nothing reads {name} after the write: its attention uses something else", write.node.name)
    return None


def shared_storage(program: Program) -> dict[str, str]:
    """For each cache whose memory another cache shares, that cache's name."""
    first: dict[int, str] = {}
    clash: dict[str, str] = {}
    for name, cache in program.caches.items():
        key = program.memory.get(cache.old.name)
        if key is None:
            continue
        if key in first:
            clash[name] = first[key]
            clash[first[key]] = name
        first.setdefault(key, name)
    return clash


def _returned(output: fx.Node, node: fx.Node) -> bool:
    returned = output.args[0]
    return isinstance(returned, list | tuple) and node in returned
