"""The build process: `python -m compiler_service.worker.child`, started once for each attempt, explanation and key."""

from __future__ import annotations

from pathlib import Path

from compiler_service import pipeline
from compiler_service.ingest.digest import DigestCache
from compiler_service.pipeline import Workspace
from compiler_service.spec import decode_spec
from compiler_service.worker.channel import Channel
from compiler_service.worker.protocol import Built, Explained, Failed, Keyed, Request, Verb
from shared.artifacts.locate import open_store
from shared.errors import QuireError
from shared.jobs.job import JobError


def run(request: Request, channel: Channel) -> Built | Explained | Keyed:
    spec = decode_spec(request.spec.encode())
    workspace = Workspace(
        store=open_store(request.store),
        digests=DigestCache(Path(request.digest_cache)),
        model_roots=tuple(map(Path, request.model_roots)),
    )
    if request.verb is Verb.EXPLAIN:
        return Explained(pipeline.explain(spec, workspace, channel.progress))
    if request.verb is Verb.KEY:
        return Keyed(dict(pipeline.key(spec, workspace, channel.progress).components))
    result = pipeline.build(spec, workspace, channel.progress, channel.wait_for_permission)
    return Built(result.artifact_id, result.reused)


def main() -> None:
    channel = Channel()
    request = channel.request()
    try:
        channel.send(run(request, channel))
    except QuireError as error:
        channel.send(Failed(JobError.of(error)))


if __name__ == "__main__":
    main()
