"""Health as the serving loop shows it: alive while it makes progress, ready while it admits and has all it starts with."""

from __future__ import annotations

import asyncio

from runtime_service.loop import ServingLoop
from runtime_service.service.engines import Engines
from shared.rpc.server import Server

POLL_S = 0.5


def probe(loop: ServingLoop, engines: Engines, hang_after_s: float) -> tuple[bool, bool]:
    """(live, ready). An idle loop is live; one with requests and no progress for longer than `hang_after_s` is neither."""
    live = loop.stalled_for_s() <= hang_after_s
    return live, live and engines.is_started and not loop.load().draining


async def report_health(server: Server, loop: ServingLoop, engines: Engines, hang_after_s: float) -> None:
    """Keep the server's health services up to date until cancelled."""
    reported = None
    while True:
        current = probe(loop, engines, hang_after_s)
        if current != reported:
            live, ready = reported = current
            await server.set_live(live)
            await server.set_ready(ready)
        await asyncio.sleep(POLL_S)
