"""Checks the Triton launch of `quire::linears` against float32 products under the interpreter.

TRITON_INTERPRET=1 python -m tests.support.linear.interpreted
"""

from __future__ import annotations

import torch

from shared.kernels.linear.triton.launch import launch
from shared.kernels.linear.triton.plan import LinearPlan

WIDTHS = ((40,), (64, 7), (33, 16, 90))
"""Outputs of a group's weights: tiles that end inside a weight, at its end and past it."""


def check(rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, weights = noise(rows, 2, 256)[:, 1], [noise(width, 256) for width in widths]
    got = launch(x, weights, LinearPlan(max(16, 1 << (rows - 1).bit_length()), 32, 128, 4, 3))
    for y, weight in zip(got, weights, strict=True):
        assert (y.dtype, y.is_contiguous()) == (dtype, True)
        torch.testing.assert_close(y.float(), x.float() @ weight.float().t(), rtol=2e-2, atol=0.13)


def main() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for rows in (1, 3, 17):
            for widths in WIDTHS:
                check(rows, widths, dtype)
    print("checked")


if __name__ == "__main__":
    main()
