"""A build process without a build: does what its spec (a JSON object) says, through the real pipes of a real one.

report: [[stage, fraction, message], ...]       end: built, failed, retryable, crash, exit, hang, garbage, silence
crash_until: attempts that crash first (counted in `counter`)      megabytes: hold so much memory
children: paths of pid files, one stubborn child each              ask: ask to publish; `published` is touched once allowed
components: the key it would have        gate: a directory; waits there for a file named after the spec's max_len
publish: publishes `size` random bytes under the spec's digest, unless that is there already, and adds a line to `log`; takes up to
`pause` seconds before and again within the publication
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from compiler_service.worker.channel import Channel
from compiler_service.worker.protocol import Built, Explained, Failed, Keyed, Request, Verb
from shared.artifacts.files import describe_files
from shared.artifacts.locate import open_store
from shared.errors import SourceInvalid, StoreUnavailable
from shared.jobs.job import JobError
from shared.manifest import WriteCertificate, canonical_json

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
    if "gate" in plan:
        while not Path(plan["gate"], str(json.loads(request.spec)["max_len"])).exists():
            time.sleep(0.02)
    if "publish" in plan:
        channel.send(publish(request, channel, **plan["publish"]))
        return
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
            channel.send(Failed(JobError.of(SourceInvalid("shard 2 is missing", field="spec.source", details={"shard": "2"}))))
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


def publish(request: Request, channel: Channel, size: int, log: str, pause: float) -> Built:
    """What a real build does with the store, and in that order."""
    artifact_id = hashlib.sha256(request.spec.encode()).hexdigest()
    store = open_store(request.store)
    if store.contains(artifact_id):
        return Built(artifact_id, reused=True)
    channel.progress("build", 0.0, artifact_id)
    time.sleep(random.random() * pause)
    with store.stage() as staged:
        (staged / "engine.bin").write_bytes(os.urandom(size))  # no two builds give the same bytes
        manifest = {"artifact_id": artifact_id, "kind": "model", "files": [asdict(entry) for entry in describe_files(staged)]}
        channel.wait_for_permission()
        channel.progress("publish", 0.0, artifact_id)
        time.sleep(random.random() * pause)
        published = store.publish(artifact_id, staged, canonical_json(manifest))
    if published:
        with Path(log).open("a") as lines:
            lines.write(f"{artifact_id}\n")
    return Built(artifact_id, reused=not published)


if __name__ == "__main__":
    main()
