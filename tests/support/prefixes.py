"""What a pool offers to later requests, compared with what the tiny model would have written."""

from __future__ import annotations

from functools import lru_cache

import torch

from runtime_service.kv.prefix_index import Prefix
from runtime_service.session.session import EngineSession
from tests.support.tiny_engine import HEAD_DIM, KV_HEADS, TinyModel, _norm, _rotate, _rotations


@lru_cache(maxsize=4096)
def first_keys(model: TinyModel, tokens: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """Keys of layer 0 of `tokens` at the positions from `start` on, `[KV_HEADS, tokens, HEAD_DIM]`."""
    embedded = torch.from_numpy(model.weights["embed"])[list(tokens)]
    keys_HTD = (_norm(embedded) @ torch.from_numpy(model.weights["0.k"])).unflatten(-1, (KV_HEADS, HEAD_DIM)).transpose(0, 1)
    return _rotate(keys_HTD, _rotations()[start : start + len(tokens)]).float()


def check_prefixes(session: EngineSession, model: TinyModel) -> None:
    """Every page of the index lies behind one that is there, and holds the keys of its tokens at its place.
    Idle, it is nobody's."""
    index, page_size = session.allocator._prefixes, session.pool.spec.page_size
    keys = session.pool.by_page(0)[:, 0]
    for page, prefix in index._by_page.items():
        assert prefix.page == page
        assert len(prefix.tokens) == page_size
        assert index._prefixes[prefix.parent, prefix.tokens] is prefix
        assert session.allocator.is_owned(page) != (page in index.idle)
        if isinstance(prefix.parent, Prefix):
            assert index.holds(prefix.parent)
            assert prefix in prefix.parent.children
            assert prefix.depth == prefix.parent.depth + 1
        expected = first_keys(model, prefix.tokens, (prefix.depth - 1) * page_size)
        assert torch.allclose(keys[page], expected, rtol=1e-5, atol=1e-6), prefix
    assert len(index._prefixes) == len(index._by_page)


class Colliding(int):
    """A token id whose hash is that of every other."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 1
