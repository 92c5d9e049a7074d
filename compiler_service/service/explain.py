"""Explanations and keys come from a build process like builds do: what exports a model may crash, the service must not."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from compiler_service.spec import CompileSpec, encode_spec
from compiler_service.worker.build_process import BuildProcess, Launcher
from compiler_service.worker.protocol import Explained, Failed, Keyed, Verb
from compiler_service.worker.worker import BuildPaths
from shared.artifacts.key import ArtifactKey
from shared.errors import BuildFailed, RunTimeout
from shared.ids import new_id
from shared.manifest import WriteCertificate
from shared.rpc.status import error_class

_Answer = TypeVar("_Answer", Explained, Keyed)


class Explainer:
    """At most `slots` processes at a time, each at most `timeout_s` long, waiting included.

    Raises the error the process met; a caller that goes away ends the process.
    """

    def __init__(self, launcher: Launcher, paths: BuildPaths, slots: int, timeout_s: float) -> None:
        self._launcher, self._paths = launcher, paths
        self._slots, self._timeout_s = asyncio.Semaphore(slots), timeout_s

    async def explain(self, spec: CompileSpec) -> tuple[WriteCertificate, ...]:
        """Certificates of every cache write."""
        return (await self._ask(Verb.EXPLAIN, spec, Explained)).caches

    async def key(self, spec: CompileSpec) -> ArtifactKey:
        """Key of the engine of `spec`. The model is converted and stored if no build has done so."""
        return ArtifactKey((await self._ask(Verb.KEY, spec, Keyed)).components)

    async def _ask(self, verb: Verb, spec: CompileSpec, kind: type[_Answer]) -> _Answer:
        request = self._paths.request(verb, encode_spec(spec).decode())
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._slots,
                self._launcher.process(request, f"{verb}-{new_id()}") as process,
            ):
                return await self._answer(process, kind)
        except TimeoutError:
            raise RunTimeout(
                f"the model could not be explained within {self._timeout_s:g} s; it is large, or the host is busy"
            ) from None
        except OSError as error:
            raise BuildFailed(f"no process could be started to explain the model: {error}; has the host room left?") from error

    async def _answer(self, process: BuildProcess, kind: type[_Answer]) -> _Answer:
        async for message in process.messages():
            if isinstance(message, kind):
                process.drop_log()
                return message
            if isinstance(message, Failed):
                process.drop_log()
                error = message.error
                raise error_class(error.reason)(error.message, field=error.at, details=error.details)
        raise BuildFailed(f"the process that explains {await process.how_it_ended()}")
