"""Starts a build that hangs, prints the process ids of the build and a child in its group, and waits to be killed."""

import asyncio
import json
import sys
from pathlib import Path

from compiler_service.worker.build_process import Launcher
from compiler_service.worker.protocol import Request, Verb
from shared.artifacts.locate import StoreLocation

FAKE = (sys.executable, "-m", "tests.support.fake_build")


async def main(directory: Path) -> None:
    # Of the two children the fake starts, the second stays in its group.
    files = [directory / "build.pid", directory / "child0.pid", directory / "child1.pid"]
    plan = {"end": "hang", "pid": str(files[0]), "children": [str(files[1]), str(files[2])]}
    request = Request(Verb.BUILD, json.dumps(plan), StoreLocation("store", "", 0), "digests", ())
    async with Launcher(directory / "builds", FAKE).process(request, "orphan"):
        while not all(file.exists() and file.read_text() for file in files):
            await asyncio.sleep(0.02)
        print(files[0].read_text(), files[2].read_text(), flush=True)
        await asyncio.sleep(600)


sys.path.insert(0, str(Path.cwd()))
asyncio.run(main(Path(sys.argv[1])))
