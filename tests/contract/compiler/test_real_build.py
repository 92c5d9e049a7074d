"""One real build through the service and its real process: what the fakes stand for."""

import dataclasses

from compiler_service.ingest.safetensors_header import read_safetensors_header
from compiler_service.worker.build_process import COMMAND
from shared.manifest import decode_engine_manifest, decode_model_manifest
from shared.pb.quire.v1 import compiler_pb2 as pb
from tests.contract.compiler.conftest import profile, sizes
from tests.support.sources import write_checkpoint

STAGES = ["fetch", "load", "export", "lower", "prove", "build", "verify", "publish"]


async def test_a_checkpoint_becomes_a_verified_engine_once(start):
    async with start() as client:
        for worker in client.compiler.workers:
            worker._launcher = dataclasses.replace(worker._launcher, command=COMMAND)
        write_checkpoint(client.models / "tiny")
        profiles = [profile("decode", sizes(1, 4), sizes(1, 1)), profile("prefill", sizes(1, 3), sizes(1, 16))]
        spec = client.spec("tiny", max_len=64, page_size=8, profiles=profiles)
        first = (await client.create(spec)).job
        events = await client.events(first.job_id)
        seen = [pb.BuildStage.Name(event.stage).removeprefix("BUILD_STAGE_").lower() for event in events if event.stage]
        assert list(dict.fromkeys(seen)) == STAGES
        job = await client.get(first.job_id)
        assert (job.state, job.reused) == (pb.JOB_STATE_SUCCEEDED, False), job.error
        assert max(event.rss_bytes for event in events) > 100 << 20

        manifest = decode_engine_manifest(client.store.manifest(job.artifact_id))
        model = decode_model_manifest(client.store.manifest(manifest.model.model_id))
        assert [c.verdict_after for c in manifest.proof] == ["proved"] * 4
        assert all(c.aliased and c.binding for c in manifest.proof)
        assert set(manifest.constants.values()) <= {*_tensors(client, model.artifact_id)}
        client.store.verify(job.artifact_id)
        weights = next(entry.size for entry in model.files if entry.path == "weights.safetensors")
        assert weights == model.facts.weights_bytes
        assert not list(client.compiler._settings.build_directory.iterdir())

        # Another process (with another hash seed) comes to the same key, although the request is not the same flight.
        (client.models / "tiny" / "config.json").touch()
        again = await client.end_of((await client.create(spec)).job.job_id)
        assert again.job_id != first.job_id
        assert (again.artifact_id, again.reused) == (job.artifact_id, True)


def _tensors(client, model_id):
    with client.store.open(model_id) as handle:
        return read_safetensors_header(handle.path("weights.safetensors"))
