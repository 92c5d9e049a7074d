"""A build process without a build: does what its spec (a JSON object) says, through the real pipes of a real one.

report: [[stage, fraction, message], ...]       end: built, failed, retryable, crash, exit, hang, garbage, silence
crash_until: attempts that crash first (counted in `counter`)      megabytes: hold so much memory
children: paths of pid files, one stubborn child each              ask: ask to publish; `published` is touched once allowed
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from compiler_service.worker.channel import Channel
from compiler_service.worker.protocol import Built, Explained, Failed, Keyed, Verb
from shared.errors import SourceInvalid, StoreUnavailable
from shared.jobs.job import JobError
from shared.manifest import WriteCertificate

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""
CERTIFICATE = WriteCertificate(
    cache="k_cache.0",
    node="index_put",
    form="index_put",
    axis=2,
    start="write_start",
    length="n",
    verdict_before="proved",
    verdict_after="proved",
    binding="",
    aliased=False,
    reason="",
)


def main() -> None:
    channel = Channel()
    request = channel.request()
    plan = json.loads(request.spec)
    if "profiles" in plan:  # a real spec: the servicer's tests
        plan = json.loads(Path(request.model_roots[0], plan["source"], "plan.json").read_text())
    print("a library prints to standard output")
    if "pid" in plan:
        Path(plan["pid"]).write_text(str(os.getpid()))
    children = [
        # A session of its own, like the compiler processes of a careful library: a signal to the group does not reach it.
        subprocess.Popen([sys.executable, "-c", STUBBORN, path], start_new_session=index % 2 == 0)
        for index, path in enumerate(plan.get("children", ()))
    ]
    for path in plan.get("children", ()):
        while not Path(path).exists() or not Path(path).read_text():
            time.sleep(0.01)
    held = bytearray(os.urandom(1 << 20)) * plan.get("megabytes", 0)
    for stage, fraction, message in plan.get("report", ()):
        channel.progress(stage, fraction, message)
    if "counter" in plan:
        counter = Path(plan["counter"])
        attempts = int(counter.read_text()) + 1 if counter.exists() else 1
        counter.write_text(str(attempts))
        if attempts <= plan["crash_until"]:
            os.kill(os.getpid(), signal.SIGKILL)
    if plan.get("ask"):
        channel.wait_for_permission()
        Path(plan["published"]).touch()
    if request.verb is Verb.EXPLAIN and plan["end"] == "built":
        channel.send(Explained((CERTIFICATE,)))
        return
    if request.verb is Verb.KEY and plan["end"] == "built":
        channel.send(Keyed(plan["components"]))
        return
    match plan["end"]:
        case "built":
            channel.send(Built(plan.get("artifact_id", "a" * 64), plan.get("reused", False)))
        case "failed":
            channel.send(Failed(JobError.of(SourceInvalid("shard 2 is missing", details={"shard": "2"}))))
        case "retryable":
            channel.send(Failed(JobError.of(StoreUnavailable("the disk is full"))))
        case "crash":
            print("about to fall over", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            raise RuntimeError("a bug")
        case "hang":
            time.sleep(600)
        case "garbage":
            os.write(channel._reports.fileno(), b'{"kind": "progress"}\n')
            time.sleep(600)
    del held, children


if __name__ == "__main__":
    main()
