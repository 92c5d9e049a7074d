"""The runtime's rounds on a GPU: a section of compaction_check.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from shared.kernels.compaction.modes import Mode, RowMode
from shared.kernels.compaction.triton.move import split_kernel, walk_kernel
from shared.kernels.compaction.triton.pack import pack_kernel
from tests.support.compaction import twins


def check_runtime_rounds(device: torch.device) -> Iterator[tuple[str, int]]:
    """The runtime's rounds beside the same on the CPU, with forks, preemption and a draft: the same pools, maps and page lists,
    without a wait for the device, an allocation on it, or a kernel to compile."""
    for mode, rows in itertools.product(Mode, RowMode):
        for name, spec in twins.specs(mode).items():
            policy = twins.policy_for(rows, spec)
            if policy is None:
                continue
            drafted = rows is RowMode.UNION
            pair = [twins.Twin(at, spec, policy, mode, drafted) for at in (torch.device("cpu"), device)]
            compiled = variants()
            pair[1].compactor.prepare(pair[1].request)
            rng, faults, allocated = np.random.default_rng(6), 0, 0
            for _ in range(300):
                twins.step(rng, pair)
                if pair[0].due():
                    pair[0].compactor.run(pair[0].due())
                    allocated += unwaited(device, pair[1])
                    faults += twins.differing(pair)
            assert pair[0].compactor.evidence.rounds > 10
            yield f"runtime {mode} {rows} {name}", faults
            yield f"runtime {mode} {rows} {name} allocates nothing", allocated
            yield f"runtime {mode} {rows} {name} compiles nothing", variants() - compiled


def unwaited(device: torch.device, twin: twins.Twin) -> int:
    """Run what is due, allowed no wait for the device; returns how often it allocated there."""
    before = allocations(device)
    torch.cuda.set_sync_debug_mode("error")
    twin.compactor.run(twin.due())
    torch.cuda.set_sync_debug_mode("default")
    return allocations(device) - before


def variants() -> int:
    """Kernels compiled so far in this process."""
    kernels = (pack_kernel, walk_kernel, split_kernel)
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def allocations(device: torch.device) -> int:
    """Device allocations made so far, through torch's allocator and past it."""
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    return int(stats["allocation.all.allocated"]) + int(stats["num_alloc_retries"])
