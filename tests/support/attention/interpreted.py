"""Checks the Triton launches against the reference under the interpreter.

TRITON_INTERPRET=1 python -m tests.support.attention.interpreted
"""

from __future__ import annotations

import dataclasses

import torch

from shared.kernels.attention import reference
from shared.kernels.attention.triton import launch
from tests.support.attention.cases import CAPACITY, TOLERANCE, Case, bits, make

BASE = Case(dim=32, starts=(0, 37, 90), page_size=16, kv_heads=1)
FAR = 2**31 + 2**20
"""An element offset that 32 bits cannot hold."""

CASES = [
    BASE,
    dataclasses.replace(BASE, count=3, group=4, dtype=torch.bfloat16, kv_heads=2),
    dataclasses.replace(BASE, count=20, group=2, dtype=torch.float16, dim=64),
    dataclasses.replace(BASE, dim=80, page_size=32, dtype=torch.bfloat16),
    dataclasses.replace(BASE, dim=96, count=5, page_size=1, group=3),
    dataclasses.replace(BASE, dim=128, page_dim=1, page_size=CAPACITY, padding=64),
    dataclasses.replace(BASE, dim=256, count=2, page_size=64, starts=(80,)),
    dataclasses.replace(BASE, window=1),
    dataclasses.replace(BASE, window=20, count=9, group=2),
    dataclasses.replace(BASE, window=33, softcap=2.0, sinks=True, count=4, kv_heads=2, page_size=24),
    dataclasses.replace(BASE, softcap=0.5, sinks=True),
    dataclasses.replace(BASE, starts=(300, 5), capacity=320, page_size=32, sinks=True, group=1),
    dataclasses.replace(BASE, starts=(250,), capacity=320, window=140, count=33, group=2, dtype=torch.bfloat16),
]


def check(case: Case) -> None:
    """Both ops, with NaN wherever no query may look; bfloat16 weights are rounded before they meet the values."""
    inputs = make(case)
    expected = inputs.copy()
    tolerance = TOLERANCE[case.dtype] | ({"atol": 2**-6} if case.dtype == torch.bfloat16 else {"atol": 2**-8})
    if case.dtype == torch.float32:
        tolerance = TOLERANCE[case.dtype]
    want = reference.paged_attend(*expected.paged_arguments())
    got = launch.paged_attend(*inputs.paged_arguments())
    assert torch.equal(bits(inputs.storage), bits(expected.storage)), "the pool"
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, **tolerance)
    torch.testing.assert_close(launch.attend(inputs.q, *inputs.caches(), inputs.start, *inputs.options), want, **tolerance)


def check_far_pages() -> None:
    """A page past 2^31 elements is written and read there: offsets are 64-bit. Hardly any of the storage is touched."""
    case = dataclasses.replace(BASE, starts=(20,), group=1)
    near = make(case)
    want = reference.paged_attend(*near.copy().paged_arguments())
    page = near.pool.stride(0)
    stride = FAR // 2 // page * page
    storage = torch.empty(2 * stride + page)
    pool = storage.as_strided((3, *near.pool.shape[1:]), (stride, *near.pool.stride()[1:]))
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    for ordinal in (0, 1):
        pool[ordinal + 1] = near.pool[int(near.table[0, ordinal])]
    got = launch.paged_attend(near.q, near.k, near.v, pool, table, near.start, 0, *near.options)
    assert pool[2].storage_offset() > 2**31
    torch.testing.assert_close(got, want, **TOLERANCE[torch.float32])
    assert torch.equal(pool[2, 0, 0, 4], near.k[0, 0, 0])


def main() -> None:
    for case in CASES:
        check(case.fitted())
        print(case.fitted(), flush=True)
    check_far_pages()
    print(f"checked {len(CASES)} cases and far pages")


if __name__ == "__main__":
    main()
