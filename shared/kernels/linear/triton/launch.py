"""`quire::linears` on a GPU: few rows through one launch, more of them through the matrix library."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.kernels.linear.triton.kernels import few_rows_kernel
from shared.kernels.linear.triton.plan import LinearPlan, plan_linears


def linears(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """See shared/kernels/linear/ops.py."""
    rows = x.numel() // x.shape[-1]
    plan = None
    if all(weight.is_contiguous() for weight in weights):
        plan = plan_linears(
            rows=rows,
            outputs=sum(weight.shape[0] for weight in weights),
            inputs=x.shape[-1],
            weights=len(weights),
            itemsize=x.element_size(),
        )
    if plan is None:
        return [torch.nn.functional.linear(x, weight) for weight in weights]
    return launch(x, weights, plan)


def launch(x: Tensor, weights: Sequence[Tensor], plan: LinearPlan) -> list[Tensor]:
    """One pass over `weights`, at most three of them, contiguous."""
    inputs = x.shape[-1]
    x_MK = x.reshape(-1, inputs)
    if x_MK.stride(-1) != 1:
        x_MK = x_MK.contiguous()
    outs = [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]
    widths = [weight.shape[0] for weight in weights]
    absent = 3 - len(weights)
    few_rows_kernel[(sum(-(-width // plan.block_n) for width in widths),)](
        x_MK,
        *weights,
        *[weights[0]] * absent,
        *outs,
        *[outs[0]] * absent,
        x_MK.shape[0],
        x_MK.stride(0),
        *widths,
        *[0] * absent,
        K=inputs,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        STAGES=plan.stages,
        WIDE=x.device.type == "cpu" and x.dtype == torch.bfloat16,
        num_warps=plan.num_warps,
    )
    return outs
