"""Compile jobs over gRPC: one build for one request, watched without gaps, ended for good."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.artifacts.local import LocalStore
from shared.jobs.job import JobLimits
from shared.pb.quire.v1 import common_pb2
from shared.pb.quire.v1 import compiler_pb2 as pb
from tests.contract.compiler.conftest import ENGINE_ID, profile, refused, sizes

REPORT = [["fetch", 0.0, "source"], ["load", 0.5, "half"], ["export", 0.0, "2 layers"], ["build", 1.0, "done"]]


async def test_a_job_from_request_to_artifact(client):
    created = await client.create(client.spec(client.source(report=REPORT, artifact_id=ENGINE_ID)), "mine")
    assert (created.created, created.job.request_id, created.job.state) == (True, "mine", pb.JOB_STATE_QUEUED)
    events = await client.events(created.job.job_id)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    stages = [pb.BuildStage.Name(e.stage) for e in events if e.message in ("source", "half", "2 layers", "done")]
    assert stages == [f"BUILD_STAGE_{name}" for name in ("FETCH", "LOAD", "EXPORT", "BUILD")]
    assert (events[-1].state, events[-1].artifact_id) == (pb.JOB_STATE_SUCCEEDED, ENGINE_ID)
    assert all(not event.artifact_id for event in events[:-1])
    job = await client.get(created.job.job_id)
    assert (job.state, job.artifact_id, job.attempt) == (pb.JOB_STATE_SUCCEEDED, ENGINE_ID, 1)
    assert job.created_at.ToNanoseconds() <= job.started_at.ToNanoseconds() <= job.finished_at.ToNanoseconds()
    assert job.spec.source == "m"
    assert list(job.spec.targets) == ["cpu"]


async def test_a_watch_goes_on_where_it_broke_off(client):
    job_id = (await client.create(client.spec(client.source(report=REPORT)))).job.job_id
    whole = await client.events(job_id)
    for after in (0, 3, len(whole) - 1):
        assert await client.events(job_id, after) == whole[after:]
    assert await client.events(job_id, len(whole)) == []


async def test_a_failure_tells_why_in_the_event_and_in_the_job(client):
    job_id = (await client.create(client.spec(client.source(end="failed")))).job.job_id
    last = (await client.events(job_id))[-1]
    job = await client.get(job_id)
    assert (last.state, job.state) == (pb.JOB_STATE_FAILED, pb.JOB_STATE_FAILED)
    assert last.error == job.error
    assert (job.error.code, job.error.reason, dict(job.error.metadata)) == (3, "SOURCE_INVALID", {"shard": "2"})


async def test_the_same_request_id_is_the_same_job(client):
    spec = client.spec(client.source(end="hang"))
    first = await client.create(spec, "r1")
    again = await client.create(spec, "r1")
    assert (again.job.job_id, again.created) == (first.job.job_id, False)
    with refused("DUPLICATE_REQUEST"):
        await client.create(client.spec("m", max_len=1024), "r1")


async def test_the_same_spec_is_one_build_whoever_asks(client):
    """Single flight, while it waits, while it runs and, as long as its artifact is there, when it is done."""
    client.publish()
    spec = client.spec(client.source(artifact_id=ENGINE_ID))
    answers = await asyncio.gather(*(client.create(spec) for _ in range(8)))
    assert len({answer.job.job_id for answer in answers}) == 1
    assert sum(answer.created for answer in answers) == 1
    first = await client.end_of(answers[0].job.job_id)
    late = await client.create(spec)
    assert (late.created, late.job.job_id, late.job.state) == (False, first.job_id, pb.JOB_STATE_SUCCEEDED)


async def test_what_makes_another_build(client):
    """BR-140, and a source whose files changed under the same name."""
    client.publish()
    spec = client.spec(client.source(artifact_id=ENGINE_ID))
    first = (await client.create(spec)).job.job_id
    await client.end_of(first)
    changed = [
        client.spec("m", dtype=common_pb2.ELEMENT_TYPE_BFLOAT16),
        client.spec("m", max_len=1024),
        client.spec("m", page_size=32),
        client.spec("m", layout=common_pb2.KV_LAYOUT_LINEAR, page_size=0),
        client.spec("m", profiles=[spec.profiles[0], profile("prefill", sizes(1, 2), sizes(1, 128))]),
        client.spec("m", profiles=[spec.profiles[1], spec.profiles[0]]),
    ]
    ids = {first, *[(await client.create(other)).job.job_id for other in changed]}
    assert len(ids) == len(changed) + 1
    (client.models / "m" / "config.json").write_text(json.dumps({"new": True}))
    assert (await client.create(spec)).job.job_id not in ids


async def test_a_job_whose_artifact_was_deleted_is_built_again(client):
    spec = client.spec(client.source(artifact_id=ENGINE_ID))
    first = (await client.create(spec)).job.job_id
    await client.end_of(first)
    again = await client.create(spec)
    assert again.created
    assert again.job.job_id != first


async def test_an_unsuccessful_job_does_not_answer_others(client):
    spec = client.spec(client.source(end="failed"))
    first = (await client.create(spec)).job.job_id
    await client.end_of(first)
    assert (await client.create(spec)).job.job_id != first


async def test_cancel(client):
    job_id = (await client.create(client.spec(client.source(end="hang", report=REPORT[:1])))).job.job_id
    waiting = (await client.create(client.spec("m", max_len=1024))).job.job_id
    for job in (waiting, job_id):
        await client.stub.CancelCompileJob(pb.CancelCompileJobRequest(job_id=job))
        assert (await client.end_of(job)).state == pb.JOB_STATE_CANCELLED
        again = await client.stub.CancelCompileJob(pb.CancelCompileJobRequest(job_id=job))
        assert again.job.state == pb.JOB_STATE_CANCELLED


async def test_retry(client):
    job_id = (await client.create(client.spec(client.source(end="hang")))).job.job_id
    with refused("JOB_STATE_CONFLICT"):
        await client.stub.RetryCompileJob(pb.RetryCompileJobRequest(job_id=job_id, request_id="again"))
    await client.stub.CancelCompileJob(pb.CancelCompileJobRequest(job_id=job_id))
    await client.end_of(job_id)
    (client.models / "m" / "plan.json").write_text(json.dumps({"end": "built"}))
    retried = (await client.stub.RetryCompileJob(pb.RetryCompileJobRequest(job_id=job_id, request_id="again"))).job
    assert retried.job_id != job_id
    assert (await client.end_of(retried.job_id)).state == pb.JOB_STATE_SUCCEEDED
    assert (await client.get(job_id)).state == pb.JOB_STATE_CANCELLED
    with refused("JOB_STATE_CONFLICT"):
        await client.stub.RetryCompileJob(pb.RetryCompileJobRequest(job_id=retried.job_id, request_id="more"))


async def test_listing(client):
    client.source(end="hang")
    ids = [(await client.create(client.spec("m", max_len=512 + i))).job.job_id for i in range(5)]
    await client.stub.CancelCompileJob(pb.CancelCompileJobRequest(job_id=ids[2]))
    seen, token = [], ""
    while True:
        page = await client.stub.ListCompileJobs(pb.ListCompileJobsRequest(page_size=2, page_token=token))
        seen += [job.job_id for job in page.jobs]
        token = page.next_page_token
        if not token:
            break
    assert seen == ids[::-1]
    cancelled = await client.stub.ListCompileJobs(pb.ListCompileJobsRequest(states=[pb.JOB_STATE_CANCELLED]))
    assert [job.job_id for job in cancelled.jobs] == [ids[2]]
    for request, field in (
        (pb.ListCompileJobsRequest(page_size=10_000), "page_size"),
        (pb.ListCompileJobsRequest(page_token="nonsense"), "page_token"),
        (pb.ListCompileJobsRequest(states=[pb.JOB_STATE_UNSPECIFIED]), "states"),
    ):
        with refused("FIELD_OUT_OF_RANGE", field):
            await client.stub.ListCompileJobs(request)


async def test_a_job_whose_spec_another_version_wrote_is_listed_with_the_others(client):
    submission = await client.compiler._queue.submit(
        request_id="old", spec=b'{"model":"m"}', spec_digest="0" * 64, limits=JobLimits(max_attempts=1)
    )
    ended = await client.end_of(submission.job.job_id)
    assert not ended.HasField("spec")
    created = (await client.create(client.spec(client.source()))).job
    listed = (await client.stub.ListCompileJobs(pb.ListCompileJobsRequest())).jobs
    assert [(job.job_id, job.spec.source) for job in listed] == [(created.job_id, "m"), (ended.job_id, "")]


async def test_a_job_in_a_stage_of_another_versions_worker_is_watched_and_listed(client):
    job_id = (await client.create(client.spec(client.source(report=[["quantise", 0.0, "4 bits"]])))).job.job_id
    events = await client.events(job_id)
    assert [event.stage for event in events if event.message == "4 bits"] == [pb.BUILD_STAGE_UNSPECIFIED]
    (listed,) = (await client.stub.ListCompileJobs(pb.ListCompileJobsRequest())).jobs
    assert (listed.state, listed.stage) == (pb.JOB_STATE_SUCCEEDED, pb.BUILD_STAGE_UNSPECIFIED)


@pytest.mark.parametrize("verb", ["GetCompileJob", "CancelCompileJob", "RetryCompileJob", "WatchCompileJob"])
async def test_jobs_that_do_not_exist(client, verb):
    request = getattr(pb, f"{verb}Request")

    async def call(**fields):
        answer = getattr(client.stub, verb)(request(**fields))
        return [item async for item in answer] if verb == "WatchCompileJob" else await answer

    extra = {"request_id": "r"} if verb == "RetryCompileJob" else {}
    with refused("JOB_NOT_FOUND"):
        await call(job_id="0" * 32, **extra)
    for bad in ("", "../jobs", "x" * 500):
        with refused("FIELD_OUT_OF_RANGE", "job_id"):
            await call(job_id=bad, **extra)


async def test_a_service_that_stops_leaves_its_jobs_to_the_next(start):
    async with start() as first:
        source = first.source(end="hang", report=REPORT[:1])
        job_id = (await first.create(first.spec(source))).job.job_id
        watch = first.stub.WatchCompileJob(pb.WatchCompileJobRequest(job_id=job_id))
        async for response in watch:
            if response.event.message == "source":
                break
        watch.cancel()
        (first.models / "m" / "plan.json").write_text(json.dumps({"end": "built"}))
    async with start() as second:
        job = await second.end_of(job_id)
        assert (job.state, job.attempt) == (pb.JOB_STATE_SUCCEEDED, 1)
        events = await second.events(job_id)
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))


async def test_a_store_that_hangs_keeps_no_build_from_being_ended(client, monkeypatch):
    """However many calls wait for it, and however few threads the host's cores give the process."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    job_id = (await client.create(client.spec(client.source(report=REPORT[:1], end="hang")))).job.job_id
    answered, hanging = threading.Event(), []

    def hang(*_: object) -> tuple[()]:
        hanging.append(threading.get_ident())
        assert answered.wait(60), "a test left the store hanging"
        return ()

    monkeypatch.setattr(LocalStore, "list", hang)
    listings = [asyncio.ensure_future(client.stub.ListArtifacts(pb.ListArtifactsRequest())) for _ in range(20)]
    try:
        while len(hanging) < 2:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            await client.stub.CancelCompileJob(pb.CancelCompileJobRequest(job_id=job_id))
            assert (await client.end_of(job_id)).state == pb.JOB_STATE_CANCELLED
    finally:
        answered.set()
        await asyncio.gather(*listings)
