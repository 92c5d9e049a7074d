"""Explanations run in a build process like builds do: what exports a model may crash, and must not take the service along."""

from __future__ import annotations

import asyncio

from compiler_service.spec import CompileSpec, encode_spec
from compiler_service.worker.build_process import BuildProcess, Launcher
from compiler_service.worker.protocol import Explained, Failed, Verb
from compiler_service.worker.worker import BuildPaths
from shared.errors import BuildFailed, RunTimeout
from shared.ids import new_id
from shared.manifest import WriteCertificate
from shared.rpc.status import error_class


class Explainer:
    """At most `slots` explanations at a time, each at most `timeout_s` long, waiting included."""

    def __init__(self, launcher: Launcher, paths: BuildPaths, slots: int, timeout_s: float) -> None:
        self._launcher, self._paths = launcher, paths
        self._slots, self._timeout_s = asyncio.Semaphore(slots), timeout_s

    async def explain(self, spec: CompileSpec) -> tuple[WriteCertificate, ...]:
        """Certificates of every cache write. Raises the error the process met; a caller that goes away ends the process."""
        request = self._paths.request(Verb.EXPLAIN, encode_spec(spec).decode())
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._slots,
                self._launcher.process(request, f"explain-{new_id()}") as process,
            ):
                return await self._answer(process)
        except TimeoutError:
            raise RunTimeout(
                f"the model could not be explained within {self._timeout_s:g} s; it is large, or the host is busy"
            ) from None

    async def _answer(self, process: BuildProcess) -> tuple[WriteCertificate, ...]:
        async for message in process.messages():
            if isinstance(message, Explained):
                process.drop_log()
                return message.caches
            if isinstance(message, Failed):
                process.drop_log()
                raise error_class(message.error.reason)(message.error.message, details=message.error.details)
        raise BuildFailed(f"the process that explains {await process.how_it_ended()}")
