"""Prepare what tests/gpu/tensorrt_check.py runs on a GPU: engines built here, weights, and what eager torch says on the CPU.

    python -m tests.gpu.prepare_tensorrt DIRECTORY        about five minutes on two cores

One folder a model: plan, manifest, weights, and `expected.safetensors` with the steps to run and the logits to come.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Gemma3TextConfig, PreTrainedConfig, PreTrainedModel

from compiler_service.ingest.program_caches import find_caches
from compiler_service.lowering.adopt import adopt_program
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.profiles import ProfileSet, parse_profile
from tests.gpu.attention_plans import write_attention_plans
from tests.gpu.hazard_plan import write_hazard_plan
from tests.support.decoder_steps import JUNK, int32, with_weights
from tests.support.decoders import VOCAB, last_logits, random_model, random_prompt, tiny_config
from tests.support.stock_export import export_stock
from tests.support.strided_step import strided_program
from tests.support.tensorrt_engines import Lowered, build, lower, lower_program, save_weights

PREFILL, DECODED, MAX_LEN = 8, 4, 64
ROWS, STEPS, CHUNK, PAGE_SIZE = 8, 200, 16, 16


def gemma3_of_26_layers() -> PreTrainedConfig:
    """The real model's layer pattern, a window shorter than the test, tiny widths."""
    return Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=6,
        query_pre_attn_scalar=32,
        max_position_embeddings=512,
    )


def prepare_single(directory: Path) -> None:
    """One sequence: every position of a prefill of 8, then decode at 8..11."""
    config = gemma3_of_26_layers()
    _, model = _make(directory, config, ("decode=1x1", "prefill=1x16"))
    tokens = random_prompt(PREFILL + DECODED, seed=1)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    save_file({"tokens": int32(tokens), "logits": logits.contiguous()}, directory / "expected.safetensors")


def prepare_bf16(directory: Path) -> None:
    """The same in bfloat16, three layers with two windows; expected are float32 logits of the rounded weights."""
    _, model = _make(directory, tiny_config("gemma3"), ("decode=1x1", "prefill=1x16"), dtype=DType.BFLOAT16)
    tokens = random_prompt(PREFILL + DECODED, seed=1)
    with torch.no_grad():
        logits = model.float()(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    save_file({"tokens": int32(tokens), "logits": logits.contiguous()}, directory / "expected.safetensors")


def prepare_stock(directory: Path) -> None:
    """Gemma 3 as transformers' users export it, adopted: masks and rotations of its own, batch 1, positions that are cells."""
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config("gemma3")
    stock, model = random_model(config), random_model(config)
    model.set_attn_implementation("sdpa")
    program = export_stock(model, MAX_LEN, CHUNK).run_decompositions({})
    group = LayerGroup(tuple(range(config.num_hidden_layers)), config.num_key_value_heads, config.head_dim, DType.FLOAT32)
    spec = KVCacheSpec((group,), Layout.LINEAR, MAX_LEN, MAX_LEN)
    profiles = ProfileSet(tuple(map(parse_profile, ("decode=1x1", f"prefill=1x{CHUNK}"))))
    lowered = lower_program(adopt_program(program, find_caches(program), spec, profiles))
    build(lowered, config, directory)
    _save_own_weights(lowered, directory)
    tokens = random_prompt(PREFILL + DECODED, seed=1)
    with torch.no_grad():
        logits = stock(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    save_file({"tokens": int32(tokens), "logits": logits.contiguous()}, directory / "expected.safetensors")


def prepare_copying(directory: Path) -> None:
    """Keys in place, values on a copy: three steps, with what eager torch has in its caches at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    program = strided_program()
    lowered = lower_program(program, allow_copying=True)
    build(lowered, tiny_config("llama"), directory)
    _save_own_weights(lowered, directory)
    module = program.program.module(check_guards=False)
    caches = [torch.full((1, 1, MAX_LEN, 16), JUNK) for _ in "kv"]
    record: dict[str, Tensor] = {}
    for step, (start, tokens) in enumerate(((0, [3, 1, 4, 1, 5]), (5, [9, 2]), (7, [6]))):
        logits = module(int32([tokens]), int32([start]), int32([len(tokens) - 1]), *caches)
        record |= {f"step{step}.ids": int32([tokens]), f"step{step}.start": int32([start]), f"step{step}.logits": logits}
    save_file(record | {"k_cache.0": caches[0], "v_cache.0": caches[1]}, directory / "expected.safetensors")


def prepare_paged(directory: Path) -> None:
    """The engine of `prepare_batch` over a pool of pages; it runs the same steps with the same weights."""
    _make(directory, tiny_config("llama"), (f"decode={ROWS}x1", f"prefill={ROWS}x{CHUNK}"), page_size=PAGE_SIZE)


def prepare_batch(directory: Path) -> None:
    """Eight sequences of different lengths in one pool, prefill chunks and decode steps of random rows in turn."""
    config = tiny_config("llama")
    lowered, model = _make(directory, config, (f"decode={ROWS}x1", f"prefill={ROWS}x{CHUNK}"))
    generator = torch.Generator().manual_seed(3)
    held: list[list[int]] = [random_prompt(2 + 2 * row, seed=row) for row in range(ROWS)]
    caches = _junk_caches(lowered)
    module = with_weights(lowered.exported, model.state_dict())
    record: dict[str, Tensor] = {}
    with torch.no_grad():
        for row, tokens in enumerate(held):
            record |= _step(f"start{row}", model, module, caches, [row], [[]], [tokens])
        for step in range(STEPS):
            rows = sorted(torch.randperm(ROWS, generator=generator)[: int(torch.randint(1, ROWS + 1, (1,), generator=generator))])
            rows = [int(row) for row in rows]
            decode = step % 3 != 0
            count = 1 if decode else int(torch.randint(2, CHUNK + 1, (1,), generator=generator))
            for row in rows:
                if len(held[row]) + count > MAX_LEN:
                    held[row] = []
            new = [torch.randint(VOCAB, (count,), generator=generator).tolist() for _ in rows]
            record |= _step(f"step{step}", model, module, caches, rows, [held[row] for row in rows], new)
            for row, tokens in zip(rows, new, strict=True):
                held[row] = held[row] + tokens
    for name, kind in zip(("k", "v"), caches, strict=True):
        record |= {f"{name}_cache.{layer}": cache for layer, cache in enumerate(kind)}
    record["lengths"] = int32([len(tokens) for tokens in held])
    save_file(record, directory / "expected.safetensors")


def _step(
    name: str,
    model: PreTrainedModel,
    module: torch.nn.Module,
    caches: tuple[list[Tensor], list[Tensor]],
    rows: list[int],
    histories: list[list[int]],
    new: list[list[int]],
) -> dict[str, Tensor]:
    """Run one step eagerly on the rows' caches; record its inputs and what transformers says from scratch."""
    ids, starts = int32(new), int32([len(history) for history in histories])
    positions = starts[:, None] + torch.arange(ids.shape[1], dtype=torch.int32)
    last = torch.full((len(rows),), ids.shape[1] - 1, dtype=torch.int32)
    parts = [[cache[rows] for cache in kind] for kind in caches]
    module(ids, positions, starts, last, *parts)
    for kind, changed in zip(caches, parts, strict=True):
        for cache, part in zip(kind, changed, strict=True):
            cache[rows] = part
    logits = torch.stack([last_logits(model, history + tokens) for history, tokens in zip(histories, new, strict=True)])
    return {f"{name}.rows": int32(rows), f"{name}.ids": ids, f"{name}.starts": starts, f"{name}.logits": logits}


def _junk_caches(lowered: Lowered) -> tuple[list[Tensor], list[Tensor]]:
    shapes = [(ROWS, group.kv_heads, MAX_LEN, group.head_dim) for _, group in lowered.program.cache.iter_layers()]
    return [torch.full(shape, JUNK) for shape in shapes], [torch.full(shape, JUNK) for shape in shapes]


def _save_own_weights(lowered: Lowered, directory: Path) -> None:
    """The parameters a program came with."""
    state = lowered.exported.program.state_dict
    save_file({name: state[name].clone() for name in lowered.program.weights.values()}, directory / "weights.safetensors")


def _make(
    directory: Path,
    config: PreTrainedConfig,
    profiles: tuple[str, ...],
    *,
    dtype: DType = DType.FLOAT32,
    page_size: int | None = None,
) -> tuple[Lowered, PreTrainedModel]:
    directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    lowered = lower(config, profiles, MAX_LEN, dtype, page_size=page_size)
    lower_s = time.monotonic() - began
    build(lowered, config, directory)
    build_s = time.monotonic() - began - lower_s
    size = (directory / "engine.plan").stat().st_size
    print(f"{directory.name}: lowered in {lower_s:.0f} s, built in {build_s:.0f} s, {size} bytes", flush=True)
    model = random_model(config, dtype=getattr(torch, dtype.value))
    save_weights(lowered, model, directory / "weights.safetensors")
    return lowered, model


if __name__ == "__main__":
    root = Path(sys.argv[1])
    write_attention_plans(root / "attention")
    write_hazard_plan(root / "hazard" / "engine.plan")
    prepare_paged(root / "paged")
    prepare_bf16(root / "bf16")
    prepare_stock(root / "stock")
    prepare_copying(root / "copying")
    prepare_batch(root / "batch")
    prepare_single(root / "single")
