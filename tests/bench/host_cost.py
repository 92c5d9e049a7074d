"""What serving costs the host, where the device is a clock: `python -m tests.bench.host_cost [--out FILE.json]`.

A step takes as long as one of an 8B shape's on an H200 and needs nothing of the host; real gRPC, clients in a process of their own,
without rounds and with one in most steps. Each row stands beside the clock's own rate: 100% would be a service that costs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from runtime_service.core.sampled import SampledToken
from runtime_service.device_sampling import DrawnTokens, draw_tokens
from runtime_service.engine.engine import EngineInputs
from runtime_service.kv.pool import KVPool
from shared.errors import InternalError
from shared.kv_spec import Layout
from tests.bench.gpu_cells import like_requests, served_decode
from tests.bench.machine import write_json
from tests.bench.served import Served, serve
from tests.support.tiny_engine import VOCAB, TinyModel, tiny_manifest

STEP_S = 14.8e-3
"""A decode step of 128 sequences of about 2,100 entries, bfloat16, on an H200."""
STREAMS, PROMPT, GENERATED = 128, 64, 512
ROUNDS = {"budget": 128, "interval": 64}
PAGE, MAX_LEN = 16, 1024


class Clock:
    """An engine whose steps end when their time has come, one behind the other. Every token is the same."""

    runs_ahead = True

    def __init__(self) -> None:
        spec = TinyModel().spec(Layout.PAGED, PAGE, MAX_LEN)
        self.manifest = replace(tiny_manifest(spec, (f"decode={STREAMS}x1", f"prefill=8x{PROMPT}"), ()), backend="clock")
        self.idle_at = 0.0
        self._logits = torch.nn.functional.one_hot(torch.full((STREAMS,), 7), VOCAB).float()

    def run(self, inputs: EngineInputs, pool: KVPool) -> torch.Tensor:
        self.idle_at = max(self.idle_at, time.perf_counter()) + STEP_S
        return self._logits[: inputs.batch].clone()

    def close(self) -> None: ...


@dataclass
class Late:
    """Drawn tokens that are there when the clock says so."""

    drawn: DrawnTokens
    at: float

    @property
    def ids(self) -> torch.Tensor:
        return self.drawn.ids

    def wait(self) -> list[SampledToken | InternalError]:
        time.sleep(max(0.0, self.at - time.perf_counter()))
        return self.drawn.wait()


async def row(served: Served, streams: int, rounds: dict[str, int]) -> dict[str, Any]:
    cpu = time.process_time()
    figures = await served_decode(served, like_requests(streams, VOCAB, PROMPT, GENERATED, **rounds))
    figures["cpu_ms_per_step"] = (time.process_time() - cpu) / GENERATED * 1e3
    figures["of_clock"] = figures["tokens_per_s"] * STEP_S / streams
    return figures


async def measure() -> dict[str, Any]:
    num_pages = 1 + STREAMS * (-(-(PROMPT + GENERATED) // PAGE) + 1)
    rows = {}
    clock = Clock()
    late = patch("runtime_service.session.flight.draw_tokens", lambda *of: Late(draw_tokens(*of), clock.idle_at))
    with late, tempfile.TemporaryDirectory() as data:
        async with serve(clock, Path(data), num_pages) as served:
            await served_decode(served, like_requests(STREAMS, VOCAB, PROMPT, 8))
            for streams in (32, STREAMS):
                for name, rounds in (("dense", {}), ("rounds", ROUNDS)):
                    figures = rows[f"{name} {streams}"] = await row(served, streams, rounds)
                    print(
                        f"{name:6} {streams:4} streams: {figures['of_clock']:6.1%} of the clock's rate, "
                        f"{figures['cpu_ms_per_step']:5.2f} ms of CPU a step, {figures['rounds']:5} rounds, "
                        f"{figures['round_share']:5.1%} of the time in them",
                        flush=True,
                    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("tests/bench/results/host_cost.json"))
    write_json(parser.parse_args().out, asyncio.run(measure()))


if __name__ == "__main__":
    main()
