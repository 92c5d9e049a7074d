"""Compiles the Triton kernels for compute capability 9.0, which needs no GPU: `python -m tests.support.attention.compiled [--all]`.

Prints registers, stack and shared memory of each, as ptxas assigned them. Exit status 1 if a kernel spills or does not fit.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shared.kernels.attention.triton import kernels
from shared.kernels.attention.triton.plan import next_power_of_two, plan_attend

SHARED_MEMORY = 227 << 10
POINTERS = {"q": "*{}", "k": "*{}", "v": "*{}", "out": "*{}", "pool": "*{}", "partial": "*fp32", "stats": "*fp32", "sinks": "*fp32",
            "table": "*i32", "start": "*i32", "scale": "fp32"}  # fmt: skip


def resources(kernel: triton.JITFunction, dtype: str, constants: dict[str, object], **options: int) -> tuple[int, int, int]:
    """(registers, stack bytes, shared bytes) of one thread or program."""
    signature = {name: POINTERS.get(name, "i32").format(dtype) for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    vague = set(kernel.do_not_specialize) | set(kernel.do_not_specialize_on_alignment) | {"scale", "heads"}
    known = [i for i, name in enumerate(kernel.arg_names) if name not in vague and name not in constants]
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in known},
    )
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2]), binary.metadata.shared


def attend(
    dtype: str, count: int, dim: int, *, window: int = 0, softcap: float = 0.0, sinks: bool = False, paged: bool = True
) -> str:
    itemsize = 4 if dtype == "fp32" else 2
    plan = plan_attend(batch=2, kv_heads=8, group=4, count=count, head_dim=dim, itemsize=itemsize, capacity=4096, num_sms=132)
    constants = {"GROUP": 4, "PAGE_SIZE": 32, "PAGED": paged, "WINDOW": window, "SOFTCAP": softcap, "SINKS": sinks, "DIM": dim,
                 "BLOCK_D": next_power_of_two(dim), "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "SPLITS": plan.splits,
                 "WIDE": False}  # fmt: skip
    label = f"attend {dtype} n{count} dim {dim} window {window} softcap {softcap} sinks {sinks} paged {paged} {plan}"
    return report(label, *resources(kernels.attend_kernel, dtype, constants, num_warps=plan.num_warps, num_stages=plan.num_stages))


def report(label: str, registers: int, stack: int, shared: int) -> str:
    verdict = "ok" if stack == 0 and shared <= SHARED_MEMORY else "BAD"
    return f"{verdict:3} {label}: {registers} registers, {stack} bytes of stack, {shared} of shared memory"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="every dtype with every head size, for an hour of a busy machine")
    lines = [attend("bf16", 1, 128), attend("bf16", 1024, 128)]
    lines.append(
        report(
            "write",
            *resources(kernels.write_kernel, "bf16", {"PAGE_SIZE": 32, "DIM": 128, "BLOCK_D": 128, "BLOCK_N": 1}, num_warps=1),
        )
    )
    lines.append(
        report(
            "reduce",
            *resources(kernels.reduce_kernel, "bf16", {"SINKS": True, "DIM": 128, "BLOCK_D": 128, "SPLITS": 33, "BLOCK_S": 64}),
        )
    )
    if parser.parse_args().all:
        lines += [
            attend(dtype, count, dim)
            for dtype in ("bf16", "fp16", "fp32")
            for dim in (64, 80, 96, 128, 256)
            for count in (1, 8, 512)
        ]
        lines += [attend("bf16", count, 128, window=512, softcap=30.0, sinks=True, paged=False) for count in (1, 512)]
    print("\n".join(lines))
    raise SystemExit(any(line.startswith("BAD") for line in lines))


if __name__ == "__main__":
    main()
