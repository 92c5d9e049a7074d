"""The Triton movers on a GPU, byte for byte: run from the repository's root, needs torch, triton and numpy.

    python3 -m tests.gpu.compaction_check                          everything (about 3 minutes, most of it compiling)
    python3 -m tests.gpu.compaction_check --only geometry          sections or catalogued rounds with that in their name
    compute-sanitizer --tool memcheck python3 -m tests.gpu.compaction_check --only seed
    TRITON_INTERPRET=1 python3 -m tests.gpu.compaction_check --device cpu --only catalogue

Every check compares whole allocations. Exit code 0: all equal; 1: something differs, named on standard output.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from shared.kernels.compaction.check import FaultKind
from shared.kernels.compaction.inputs import RequestRound
from shared.kernels.compaction.layout import Family
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kernels.compaction.movers import Mover
from shared.kernels.compaction.params import compact
from shared.kernels.compaction.triton import mover as triton_mover
from shared.kernels.compaction.triton.mover import Tuning
from shared.kv_spec import DType
from tests.gpu.runtime_rounds import allocations, check_runtime_rounds
from tests.property.compaction_fuzz import fuzz_round
from tests.support.compaction import catalogue
from tests.support.compaction.case import Case, GroupCase, Rig, choose_kept, differing_bytes, run, shuffled_tables
from tests.support.compaction.far import differing_far_cells
from tests.support.compaction.oracle import expected_after
from tests.support.key_norms.interpreted import wrong_norms

Outcome = tuple[str, int]
"""Name of a comparison, and how many bytes differed."""

WAYS = {"walk": Tuning(fill=0), "split": Tuning(fill=1 << 20)}
"""Tunings that force each way to share out ordered lists."""


def check_catalogue(device: torch.device, only: str, part: int, parts: int) -> Iterator[Outcome]:
    """Every catalogued round, both ways; or of `parts` equal shares of them one."""
    for index, (name, build) in enumerate(catalogue.catalogue().items()):
        if (only in name or only in "catalogue") and index % parts == part:
            case = build()
            expected = run(case, Mover.REFERENCE)
            for way, tuning in WAYS.items():
                yield f"{name} [{way}]", differing_bytes(run(case, Mover.TRITON, device, tuning=tuning), expected)


def check_random_rounds(device: torch.device) -> Iterator[Outcome]:
    """Random rounds. Each has geometries of its own to compile, so they are few; the CPU runs thousands."""
    for seed in range(20):
        yield f"random round {seed}", fuzz_round(seed, [Mover.TRITON], str(device))


def check_waits(device: torch.device) -> Iterator[Outcome]:
    """The pack kernel names every earlier tile whose sources a tile's stores clobber. Timing hides a missing one; this does not."""
    rng = np.random.default_rng(4)
    for attempt in range(12):
        masked = attempt % 4 == 3
        requests = []
        for _ in range(3):
            base, keep, tail = int(rng.integers(0, 30)), int(rng.integers(60, 120)), int(rng.integers(0, 5))
            valid_len = base + keep + int(rng.integers(1, [4, 40, 150][attempt % 3]))
            # The first entry goes, so that every move is a real one.
            requests.append(RequestRound(choose_kept(rng, 1, keep, base + 1, valid_len), base, valid_len, tail))
        family = {"family": Family.MASKED_WINDOW, "window": 50} if masked else {}
        group = GroupCase(*catalogue.tables(3, 320, 8, seed=attempt), **family)
        full = (replace(group, layers=(1,), family=Family.FULL, window=None),) if masked else ()
        rig = Rig(Case(8, (group, *full), tuple(requests), keep_capacity=130, scrub=attempt % 2 == 1), device)
        launch = triton_mover.bind_group(rig.build(Mover.REFERENCE).groups[0], rig.inputs, None, Tuning(tile_vectors=16))
        launch.pack(grid=(rig.inputs.stage(requests), 1))
        src, dst, spans, waits = (tensor.cpu().numpy()[0] for tensor in launch.pack.tensors[-5:-1])
        yield f"waits {attempt}", sum(unsafe_tiles(*lists, tile_rows=16 // 2) for lists in zip(src, dst, spans, waits, strict=True))


def unsafe_tiles(src: np.ndarray, dst: np.ndarray, span: np.ndarray, waits: np.ndarray, tile_rows: int) -> int:
    """Pairs of tiles (t, u) of one list such that t stores over a source of u and neither waits for u nor comes before it."""
    begin, end, _ = span
    tiles = [range(low, min(low + tile_rows, end)) for low in range(begin, end, tile_rows)]
    sources = [{int(src[i]) for i in tile} - {-1} for tile in tiles]
    stores = [{int(dst[i]) for i in tile} - {-1} for tile in tiles]
    assert len(tiles) > 3
    bad = 0
    for t, u in itertools.product(range(len(tiles)), repeat=2):
        first, last = waits[t]
        bad += u != t and bool(stores[t] & sources[u]) and not (first <= u <= last < t)
    return bad + sum(int(last >= t or last - first > 1) for t, (first, last) in enumerate(waits[: len(tiles)]))


def check_races(device: torch.device) -> Iterator[Outcome]:
    """Rounds that fill the chip, with sources and destinations close together, over and over."""
    rng = np.random.default_rng(0)
    for rows, (row_mode, evicted) in enumerate([(RowMode.UNION, 7), (RowMode.PER_HEAD, 130), (RowMode.PER_LAYER_HEAD, 1024)]):
        table, num_pages = catalogue.tables(8, 2048, 32, seed=rows)
        count = {RowMode.UNION: 1, RowMode.PER_HEAD: 8, RowMode.PER_LAYER_HEAD: 32}[row_mode]
        requests = tuple(RequestRound(choose_kept(rng, count, 2000 - evicted, 0, 2000), 0, 2000, 2) for _ in range(8))
        case = Case(32, (GroupCase(table, num_pages, layers=(0, 1, 2, 3), kv_heads=8, head_dim=128),), requests, row_mode=row_mode)
        for mode in Mode:
            expected = expected_after(Rig(case.with_mode(mode), device))
            for way, tuning in WAYS.items():
                rig = Rig(case.with_mode(mode), device)
                params, pristine = rig.build(Mover.TRITON, tuning=tuning), [storage.clone() for storage in rig.storages]
                count = rig.inputs.stage(requests)
                for attempt in range(5):
                    for storage, before in zip(rig.storages, pristine, strict=True):
                        storage.copy_(before)
                    compact(params, count)
                    yield f"races {row_mode} {mode} [{way}] {attempt}", differing_bytes(rig.storages, expected)


def check_far(device: torch.device) -> Iterator[Outcome]:
    """Offsets past 2^31 elements and 2^32 bytes, where no pool that large can be filled."""
    for mode in Mode:
        yield f"far cells {mode}", differing_far_cells(Mover.TRITON, device, mode)


def check_large_offsets(device: torch.device) -> Iterator[Outcome]:
    """The same with every byte of the pool different: pages more than a GiB apart, all of them compared."""
    rng = np.random.default_rng(1)
    group = GroupCase(
        shuffled_tables(rng, 1, 4, 5), 5, layers=(0,), head_dim=32, dtype=DType.BFLOAT16, slack=(600 << 20, 300 << 20, 0, 0)
    )
    case = Case(8, (group,), (RequestRound(choose_kept(rng, 1, 14, 1, 30), 1, 30, 2),))
    for mode in Mode:
        expected = expected_after(Rig(case.with_mode(mode), device))
        for way, tuning in WAYS.items():
            got = run(case.with_mode(mode), Mover.TRITON, device, tuning=tuning)
            yield f"large offsets {mode} [{way}]", differing_bytes(got, expected)


def check_changing_rounds(device: torch.device) -> Iterator[Outcome]:
    """Decisions, offsets, tables and lengths change under one set of params, and what one request frees is another's next."""
    rng = np.random.default_rng(5)
    for mode in Mode:
        for way, tuning in WAYS.items():
            case = Case(
                16, (GroupCase(*catalogue.tables(4, 256, 16), layers=(0, 1), mode=mode),), (), keep_capacity=150, scrub=True
            )
            rig, reference = Rig(case, device), Rig(case, torch.device("cpu"))
            params, specified = rig.build(Mover.TRITON, tuning=tuning), reference.build(Mover.REFERENCE)
            for attempt in range(4 if device.type == "cuda" else 2):
                stage_random(rng, rig, reference)
                compact(params, rig.inputs.batch)
                compact(specified, rig.inputs.batch)
                yield f"changing {mode} [{way}] {attempt}", differing_bytes(rig.storages, reference.storages)


def check_graph(device: torch.device) -> Iterator[Outcome]:
    """A captured round, replayed after decisions, offsets, tables and lengths changed: equal to the reference, and neither a
    replay nor an eager round allocates or waits for the device."""
    rng = np.random.default_rng(2)
    for mode in Mode:
        for way, tuning in WAYS.items():
            case = Case(
                16, (GroupCase(*catalogue.tables(4, 256, 16), layers=(0, 1), mode=mode),), (), keep_capacity=150, scrub=True
            )
            rig, reference = Rig(case, device), Rig(case, torch.device("cpu"))
            params, specified = rig.build(Mover.TRITON, tuning=tuning), reference.build(Mover.REFERENCE)
            stage_random(rng, rig, reference)
            compact(params, rig.inputs.batch)
            compact(specified, rig.inputs.batch)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                compact(params, rig.inputs.batch)
            for attempt in range(4):
                stage_random(rng, rig, reference)
                before = allocations(device)
                torch.cuda.set_sync_debug_mode("error")
                if attempt % 2:
                    compact(params, rig.inputs.batch)
                else:
                    graph.replay()
                torch.cuda.set_sync_debug_mode("default")
                allocated = allocations(device) - before
                compact(specified, rig.inputs.batch)
                what = "eager round" if attempt % 2 else "replay"
                yield f"graph {mode} [{way}] {what} {attempt}", differing_bytes(rig.storages, reference.storages)
                yield f"graph {mode} [{way}] {what} {attempt} allocates nothing", allocated


def stage_random(rng: np.random.Generator, *rigs: Rig) -> None:
    """New tables, lengths, decisions and offsets, the same in every rig, for a random number of active requests."""
    table = rng.permutation(64).astype(np.int32).reshape(4, 16) + 1
    requests = []
    for _ in range(int(rng.integers(1, 5))):
        valid_len, base = int(rng.integers(160, 250)), int(rng.integers(0, 20))
        keep = int(rng.integers(1, 150 - base))
        requests.append(RequestRound(choose_kept(rng, 1, keep, base, valid_len), base, valid_len, int(rng.integers(0, 4))))
    for rig in rigs:
        rig.layout.groups[0].block_table.copy_(torch.from_numpy(table))
        rig.inputs.stage(requests)


def check_value_check(device: torch.device) -> Iterator[Outcome]:
    """A bad value found on the device moves nothing and is named; the next sound round moves."""
    case = catalogue.seed_exact_bytes(RowMode.PER_HEAD)
    expected = run(case, Mover.REFERENCE)
    rig = Rig(case, device)
    params, untouched = rig.build(Mover.TRITON, check_values=True), [storage.clone() for storage in rig.storages]
    count = rig.inputs.stage(case.requests)
    rig.inputs.kept[1, 1, 2] = rig.inputs.kept[1, 1, 1]
    compact(params, count)
    fault = params.fault()
    named = fault is not None and (fault.kind, fault.request, fault.row, fault.index) == (FaultKind.ORDER, 1, 1, 2)
    yield f"value check names the offender ({fault})", int(not named)
    yield "value check moves nothing", differing_bytes(rig.storages, untouched)
    compact(params, rig.inputs.stage(case.requests))
    yield "value check lets a sound round pass", differing_bytes(rig.storages, expected) + int(params.fault() is not None)


def check_draft_and_wide_rounds(device: torch.device) -> Iterator[Outcome]:
    """More requests than one block of anything, most of them idle."""
    rng = np.random.default_rng(3)
    table, num_pages = catalogue.tables(96, 64, 16)
    requests = tuple(
        RequestRound(choose_kept(rng, 1, 20, 1, 60), 1, 60, 1) if index % 7 == 3 else catalogue.nothing() for index in range(96)
    )
    group = GroupCase(table, num_pages, kv_heads=4, head_dim=64)
    case = Case(16, (group,), requests, draft=(replace(group, kv_heads=1, head_dim=80),))
    expected = run(case, Mover.REFERENCE)
    for way, tuning in WAYS.items():
        yield f"idle requests and a draft [{way}]", differing_bytes(run(case, Mover.TRITON, device, tuning=tuning), expected)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    sections_help = "sections (catalogue, waits, value, changing, far, idle, random, norms, runtime, races, large, graph) or rounds"
    parser.add_argument("--only", default="", help=sections_help)
    parser.add_argument("--part", default="0/1", help="I/N: of N shares of the catalogue the I-th, from 0, to run them at once")
    parser.add_argument(
        "--limit", type=float, default=480, help="seconds after which the run is given up, say because a kernel hangs"
    )
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device(arguments.device)
    sections: dict[str, Callable[[torch.device], Iterator[Outcome]]] = {
        "catalogue": lambda device: check_catalogue(device, arguments.only, *map(int, arguments.part.split("/"))),
        "waits": check_waits,
        "value": check_value_check,
        "changing": check_changing_rounds,
        "far": check_far,
        "idle": check_draft_and_wide_rounds,
        "random": check_random_rounds,
        "norms": wrong_norms,
    }
    if device.type == "cuda":
        print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
        sections |= {"runtime": check_runtime_rounds, "races": check_races, "large": check_large_offsets, "graph": check_graph}
    failures = total = 0
    for section, check in sections.items():
        if section != "catalogue" and arguments.only not in section:
            continue
        start, count = time.monotonic(), 0
        for name, differing in check(device):
            count += 1
            if differing:
                failures += 1
                print(f"FAIL {name}: {differing}", flush=True)
        total += count
        print(f"{section}: {count} comparisons, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{'FAILED' if failures else 'OK'}: {failures} of {total} comparisons failed")
    return 1 if failures or not total else 0


if __name__ == "__main__":
    sys.exit(main())
