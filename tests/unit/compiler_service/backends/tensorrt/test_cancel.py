"""A cancel reaches TensorRT's builder at work: its process ends with all its threads, and nothing of the engine is left."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path

import pytest

from compiler_service.spec import CompileSpec, encode_spec, profile_set
from compiler_service.worker.build_process import Launcher
from compiler_service.worker.worker import BuildPaths, Worker
from shared.artifacts.local import LocalStore
from shared.artifacts.locate import StoreLocation
from shared.jobs.job import JobLimits, JobState
from shared.jobs.queue import QueuePolicy
from shared.jobs.sqlite import SQLiteQueue
from shared.kv_spec import Layout
from tests.support.decoders import random_model
from tests.support.sources import VOCAB, source_config
from tests.support.tokenizers import byte_level_tokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_tensorrt") is None or importlib.util.find_spec("tensorrt_rtx") is None,
    reason="torch_tensorrt and tensorrt_rtx are not installed",
)
LAYERS = 6
"""TensorRT works on them for several seconds; a cancel takes one to arrive."""


def write_source(directory: Path) -> None:
    config = source_config("llama")
    config.num_hidden_layers = LAYERS
    random_model(config).save_pretrained(directory)
    byte_level_tokenizer(VOCAB).save(str(directory / "tokenizer.json"))


def children() -> set[int]:
    return {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


async def test_a_cancel_ends_a_build_inside_tensorrt(tmp_path: Path) -> None:
    write_source(tmp_path / "model")
    spec = CompileSpec(
        source=str(tmp_path / "model"),
        backend="tensorrt_rtx",
        layout=Layout.LINEAR,
        dtype="float32",
        max_len=64,
        page_size=64,
        profiles=profile_set(("decode=1x1", "prefill=1x16")),
        targets=("sm80",),
        allow_copying=False,
        constant_weights=False,
    )
    before, queue = children(), SQLiteQueue(tmp_path / "jobs.sqlite", QueuePolicy())
    paths = BuildPaths(StoreLocation(str(tmp_path / "store"), "", 0), str(tmp_path / "digests"), (str(tmp_path),))
    worker = Worker(queue, "worker", Launcher(tmp_path / "builds"), paths, lambda record: None)
    working = asyncio.create_task(worker.run())
    job = (
        await queue.submit(request_id="r", spec=encode_spec(spec), spec_digest=spec.digest, limits=JobLimits(max_attempts=1))
    ).job
    builders: set[int] = set()
    stages = []
    async for event in queue.watch(job.job_id):
        stages.append(event.stage)
        if event.stage == "build" and event.fraction > 0 and not builders:  # the network stands, TensorRT begins
            builders = children() - before
            await queue.cancel(job.job_id)
    ended = await queue.get(job.job_id)
    worker.stop()
    await working
    await queue.close()
    assert (ended.state, ended.artifact_id) == (JobState.CANCELLED, "")
    assert "publish" not in stages
    assert len(builders) == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in builders)
    assert [info.kind for info in LocalStore(tmp_path / "store").list()] == ["model"], "the converted model may be used again"
    assert list((tmp_path / "builds").iterdir()) == []
    assert not any("engine.plan" in files for _, _, files in os.walk(tmp_path))
