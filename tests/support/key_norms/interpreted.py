"""`TRITON_INTERPRET=1 python -m tests.support.key_norms.interpreted`: the kernel against double precision, one key at a time."""

from __future__ import annotations

import itertools

import torch

from shared.kernels.key_norms.launch import BoundKeyNorms
from tests.support.key_norms.pools import LAYERS, NUM_PAGES, norms_one_by_one, pools

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLACES = (("paged", 16, 37), ("paged", 1, 5), ("paged", 4, 16), ("linear", 96, 81))
"""Layout, page size, entries held."""
HEADS = ((2, 64), (3, 80), (1, 5))


def main() -> None:
    for dtype, (layout, page_size, length), (heads, dim) in itertools.product(DTYPES, PLACES, HEADS):
        keys = pools(layout, heads, page_size, dim, dtype)
        index = torch.tensor([4, 2, 6, 1, 5][: -(-length // page_size)])
        for page in set(range(NUM_PAGES)) - set(index.tolist()):
            for layer in keys:
                layer[page] = float("nan")
        got = BoundKeyNorms(keys)(index, length)
        assert got.shape == (LAYERS * heads, length)
        torch.testing.assert_close(got, norms_one_by_one(keys, index, length))
    print("checked")


if __name__ == "__main__":
    main()
