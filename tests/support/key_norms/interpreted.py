"""`TRITON_INTERPRET=1 python -m tests.support.key_norms.interpreted`: the kernel against double precision, one key at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from shared.kernels.key_norms.launch import BoundKeyNorms
from tests.support.key_norms.pools import NUM_PAGES, norms_one_by_one, pools

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLACES = (("paged", 16, 37), ("paged", 1, 5), ("paged", 4, 16), ("linear", 96, 81))
"""Layout, page size, entries held."""
HEADS = ((2, 64), (3, 80), (1, 5))


def wrong_norms(device: torch.device) -> Iterator[tuple[str, int]]:
    """How many norms of each case are wrong; all pages but the sequence's hold NaN."""
    for dtype, (layout, page_size, length), (heads, dim) in itertools.product(DTYPES, PLACES, HEADS):
        keys = pools(layout, heads, page_size, dim, dtype)
        index = torch.tensor([4, 2, 6, 1, 5][: -(-length // page_size)])
        for page in set(range(NUM_PAGES)) - set(index.tolist()):
            for layer in keys:
                layer[page] = float("nan")
        wanted = norms_one_by_one(keys, index, length)
        got = BoundKeyNorms([_on(layer, device) for layer in keys])(index.to(device), length).cpu()
        name = f"key norms {dtype} {layout} pages of {page_size}, {heads} heads of {dim}"
        yield name, wanted.numel() if got.shape != wanted.shape else int((~torch.isclose(got, wanted, rtol=1e-5)).sum())


def _on(layer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """With its strides."""
    return torch.empty_strided(layer.shape, layer.stride(), dtype=layer.dtype, device=device).copy_(layer)


def main() -> None:
    for name, wrong in wrong_norms(torch.device("cpu")):
        assert not wrong, f"{name}: {wrong} are wrong"
    print("checked")


if __name__ == "__main__":
    main()
