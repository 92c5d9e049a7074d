"""TensorRT engines on a GPU against what eager torch said on the CPU: run from the repository's root.

    python3 -m tests.gpu.tensorrt_check DIRECTORY [--json FILE]      DIRECTORY made by tests.gpu.prepare_tensorrt

Needs torch, safetensors, pydantic and the engines' TensorRT library; no torch_tensorrt, no transformers. Prints one table.
Exit code 0: everything holds; 1: something does not.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from runtime_service.engine.tensorrt.library import load_library
from runtime_service.engine.tensorrt.probe import find_plan_faults
from runtime_service.kv.pool import K, V
from shared.bindings import cache_name
from shared.manifest import decode_engine_manifest
from tests.bench.machine import write_json
from tests.gpu.tensorrt_ahead import check_ahead
from tests.gpu.tensorrt_engine import JUNK, LEAST_COSINE, Engine, Row
from tests.gpu.tensorrt_refusals import check_hazards, check_refusals


def _equal(holds: bool) -> str:
    return "equal" if holds else "different"


def check_single(root: Path) -> list[Row]:
    """Prefill of 8, decode at 8..11, in slot 2 of 3: top-1, cosine, caches in place, the rest of the pool as it was."""
    expected = load_file(root / "single" / "expected.safetensors")
    tokens, wanted = expected["tokens"], expected["logits"]
    prefill, total = 8, tokens.numel()
    results = {graphs: _single(root / "single", tokens, prefill, graphs) for graphs in (False, True)}
    got, engine = results[False]
    caches = 2 * engine.manifest.cache.num_layers
    cosine = torch.cosine_similarity(got, wanted, dim=-1).min().item()
    agree = int((got.argmax(-1) == wanted.argmax(-1)).sum())
    in_place = _in_place(engine, total)
    rest = sum(_untouched(tensor, slot=2, length=total) for tensor in engine.pool.tensors)
    replayed, graphed = results[True]
    same_caches = all(map(torch.equal, engine.pool.tensors, graphed.pool.tensors))
    return [
        Row("26-layer Gemma 3: top-1 equals eager", f"{total}/{total}", f"{agree}/{total}", agree == total),
        Row("26-layer Gemma 3: least cosine", f">= {LEAST_COSINE}", f"{cosine:.7f}", cosine >= LEAST_COSINE),
        Row("26-layer Gemma 3: caches in place", f"{caches}/{caches}", f"{in_place}/{caches}", in_place == caches),
        Row("26-layer Gemma 3: pools untouched past the writes", "26/26", f"{rest}/26", rest == 26),
        Row("CUDA graph replay: logits bit for bit", "equal", _equal(torch.equal(got, replayed)), torch.equal(got, replayed)),
        Row("CUDA graph replay: caches bit for bit", "equal", _equal(same_caches), same_caches),
    ]


def _single(directory: Path, tokens: Tensor, prefill: int, graphs: bool) -> tuple[Tensor, Engine]:
    """Logits after every token. A prefill says only what its `last_index` asks, so it is repeated for each position."""
    engine = Engine(directory, slots=3, graphs=graphs)
    zero = torch.zeros(1, dtype=torch.int32)
    head = tokens[:prefill][None]
    logits = [engine.step("prefill", [2], head, zero, last) for last in range(prefill)]
    logits += [
        engine.step("decode", [2], tokens[at : at + 1][None], torch.tensor([at], dtype=torch.int32))
        for at in range(prefill, tokens.numel())
    ]
    return torch.cat(logits), engine


def _in_place(engine: Engine, length: int) -> int:
    """Caches of slot 2 whose first `length` cells were all written."""
    return sum(int((tensor[half, 2, :, :length] != JUNK).any(-1).all()) for tensor in engine.pool.tensors for half in (K, V))


def _untouched(tensor: Tensor, slot: int, length: int) -> int:
    untouched = torch.ones_like(tensor, dtype=torch.bool)
    untouched[:, slot, :, :length] = False
    return int((tensor[untouched] == JUNK).all())


def check_other_singles(root: Path) -> list[Row]:
    """bfloat16, and a program exported by transformers' own means: one sequence, prefill of 8, decode at 8..11."""
    rows = []
    for name, what, least in (("bf16", "bfloat16 Gemma 3", 0.999), ("stock", "adopted Gemma 3", LEAST_COSINE)):
        expected = load_file(root / name / "expected.safetensors")
        got, _ = _single(root / name, expected["tokens"], 8, graphs=True)
        cosine = torch.cosine_similarity(got, expected["logits"], dim=-1).min().item()
        rows.append(Row(f"{what}: least cosine to float32 eager", f">= {least}", f"{cosine:.7f}", cosine >= least))
        if name == "stock":
            agree, total = int((got.argmax(-1) == expected["logits"].argmax(-1)).sum()), len(got)
            rows.append(Row(f"{what}: top-1 equals eager", f"{total}/{total}", f"{agree}/{total}", agree == total))
    return rows


def check_copying(root: Path) -> list[Row]:
    """A write without a proof, taken on a copy because the caller allowed it."""
    record = load_file(root / "copying" / "expected.safetensors")
    rows = []
    for graphs in (False, True):
        engine = Engine(root / "copying", slots=2, graphs=graphs)
        worst = 0.0
        for step in range(3):
            ids, start, wanted = (record[f"step{step}.{part}"] for part in ("ids", "start", "logits"))
            got = engine.step("decode" if ids.shape[1] == 1 else "prefill", [2], ids, start)
            worst = max(worst, ((got - wanted).abs() / wanted.abs().clamp(min=1)).max().item())
        (pool,) = engine.pool.tensors
        same = all(torch.equal(pool[half, 2:3].cpu(), record[name]) for half, name in ((K, "k_cache.0"), (V, "v_cache.0")))
        how = "graphs" if graphs else "no graphs"
        rows += [
            Row(f"copying, {how}: logits differ from eager's by", "<= 1e-4", f"{worst:.2e}", worst <= 1e-4),
            Row(f"copying, {how}: strided values bit for bit", "equal", _equal(same), same),
        ]
    aliased = [alias.input for alias in engine.manifest.aliases]
    return [*rows, Row("copying: caches in place", "['k_cache.0']", str(aliased), aliased == ["k_cache.0"])]


SLOT_OF = [3, 1, 8, 4, 2, 6, 5, 7]
"""Slot of each of the eight sequences: neighbours in the batch are none in the pool."""


def check_paged(root: Path) -> list[Row]:
    """The steps of the batch over a pool of pages in no order: as many pages as the rows need, and junk between."""
    record = load_file(root / "batch" / "expected.safetensors")
    (root / "paged" / "weights.safetensors").write_bytes((root / "batch" / "weights.safetensors").read_bytes())
    rows = []
    for graphs in (False, True):
        how = f"paged, {'graphs' if graphs else 'no graphs'}"
        engine = Engine(root / "paged", slots=48, graphs=graphs)
        spec = engine.manifest.cache
        order = 1 + torch.randperm(48, generator=torch.Generator().manual_seed(2))[: 8 * spec.max_pages]
        table = order.int().view(8, spec.max_pages)
        rows += _run_batch(engine, record, table, how)
        worst = 0.0
        for layer, tensor in enumerate(engine.pool.tensors):
            pages = tensor[table.long()].cpu().permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
            wanted = (record[cache_name(layer, kind)] for kind in "kv")
            worst = max(worst, *((half - cache).abs().max().item() for half, cache in zip(pages, wanted, strict=True)))
        others = sorted({*range(49)} - {*order.tolist()})
        untouched = all(bool((tensor[others] == JUNK).all()) for tensor in engine.pool.tensors)
        rows += [
            Row(f"batch 8, {how}: caches differ from eager's by", "<= 1e-3", f"{worst:.2e}", worst <= 1e-3),
            Row(f"batch 8, {how}: pages of nobody untouched", "yes", "yes" if untouched else "no", untouched),
        ]
    return rows


def _run_batch(engine: Engine, record: dict[str, Tensor], table: Tensor, how: str) -> list[Row]:
    """The recorded steps; `table` has the block table of each sequence."""
    names = [f"start{row}" for row in range(8)]
    names += [f"step{step}" for step in range(sum(name.startswith("step") and name.endswith(".ids") for name in record))]
    wrong, least, total = 0, 1.0, 0
    for name in names:
        ids, starts, wanted = (record[f"{name}.{part}"] for part in ("ids", "starts", "logits"))
        got = engine.step("decode" if ids.shape[1] == 1 else "prefill", table[record[f"{name}.rows"].long()], ids, starts)
        wrong += int((got.argmax(-1) != wanted.argmax(-1)).sum())
        least = min(least, torch.cosine_similarity(got, wanted, dim=-1).min().item())
        total += len(wanted)
    right = f"{total - wrong}/{total}"
    return [
        Row(f"batch 8, {len(names)} steps, {how}: tokens equal eager's", f"{total}/{total}", right, not wrong),
        Row(f"batch 8, {how}: least cosine", f">= {LEAST_COSINE}", f"{least:.7f}", least >= LEAST_COSINE),
    ]


def check_batch(root: Path) -> list[Row]:
    """Eight rows at eight starts, prefill and decode in turn, with and without graphs; caches compared with eager's at the end."""
    directory = root / "batch"
    record = load_file(directory / "expected.safetensors")
    rows = []
    for graphs in (False, True):
        engine = Engine(directory, slots=8, graphs=graphs)
        how = "graphs" if graphs else "no graphs"
        rows += _run_batch(engine, record, torch.tensor(SLOT_OF, dtype=torch.int32)[:, None], how)
        worst = max(
            (tensor[half, SLOT_OF].cpu() - record[cache_name(layer, kind)]).abs().max().item()
            for layer, tensor in enumerate(engine.pool.tensors)
            for half, kind in ((K, "k"), (V, "v"))
        )
        dump = all(bool((tensor[:, 0] == JUNK).all()) for tensor in engine.pool.tensors)
        rows += [
            Row(f"batch 8, {how}: caches differ from eager's by", "<= 1e-3", f"{worst:.2e}", worst <= 1e-3),
            Row(f"batch 8, {how}: dump slot untouched", "yes", "yes" if dump else "no", dump),
        ]
    return rows


def check_probes(root: Path) -> list[Row]:
    """What loading does before it believes a plan."""
    rows = []
    for name in ("batch", "paged", "single", "stock"):
        engine = Engine(root / name, slots=2)
        faults = find_plan_faults(engine.manifest, engine.launcher, engine.weights)
        rows.append(Row(f"probe of {name}: faults found", "none", "; ".join(faults) or "none", not faults))
    return rows


def check_round_trip(root: Path) -> list[Row]:
    """A plan serialized again, and two engines on one copy of the weights."""
    directory = root / "batch"
    trt = load_library(decode_engine_manifest((directory / "manifest.json").read_bytes()).backend)
    first = Engine(directory, slots=8)
    again = directory / "again"
    again.mkdir(exist_ok=True)
    plan = trt.Runtime(trt.Logger(trt.Logger.WARNING)).deserialize_cuda_engine((directory / "engine.plan").read_bytes())
    (again / "engine.plan").write_bytes(bytes(plan.serialize()))
    second = Engine(directory, slots=8)
    second.load(again / "engine.plan")
    ids, zero = torch.arange(1, 9, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32)
    outputs = [engine.step("prefill", [1], ids, zero) for engine in (first, second)]
    shared = first.weights is second.weights
    equal = torch.equal(*outputs)
    return [
        Row("serialization round trip: logits bit for bit", "equal", _equal(equal), equal),
        Row("two engines read one weights buffer", "yes", "yes" if shared else "no", shared),
    ]


def check_attention(root: Path) -> list[Row]:
    """Every form of attention against the specification's values."""
    trt = load_library("tensorrt_rtx")
    rows = []
    for path in sorted((root / "attention").glob("*.plan")):
        case = {name: tensor.cuda() for name, tensor in load_file(path.with_suffix(".safetensors")).items()}
        runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        plan = runtime.deserialize_cuda_engine(path.read_bytes())
        context = plan.create_execution_context()
        wanted, out = case.pop("out"), torch.empty_like(case["q"])
        for name in [plan.get_tensor_name(index) for index in range(plan.num_io_tensors)]:
            if name != "out":
                context.set_input_shape(name, tuple(case[name].shape))
            context.set_tensor_address(name, (out if name == "out" else case[name]).data_ptr())
        torch.cuda.synchronize()
        context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        worst = (out - wanted).abs().max().item()
        rows.append(Row(f"attention, {path.stem}: differs from the specification by", "<= 1e-4", f"{worst:.2e}", worst <= 1e-4))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    rows: list[Row] = []
    checks = (
        check_attention,
        check_batch,
        check_paged,
        check_single,
        check_other_singles,
        check_copying,
        check_ahead,
        check_round_trip,
        check_probes,
        check_hazards,
        check_refusals,
    )
    for check in checks:
        rows += check(arguments.directory)
        print(f"{check.__name__} done after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    width = max(len(row.check) for row in rows)
    for row in rows:
        print(f"{'ok  ' if row.holds else 'FAIL'}  {row.check:{width}}  {row.got:>14}  (expected {row.expected})")
    failed = sum(not row.holds for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} hold; {torch.cuda.get_device_name()}, torch {torch.__version__}")
    if arguments.json:
        write_json(arguments.json, [vars(row) for row in rows])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
