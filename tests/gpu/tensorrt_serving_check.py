"""SmolLM2-135M compiled to TensorRT-RTX elsewhere, served here by both services over gRPC: run from the repository's root.

    python3 -m tests.gpu.tensorrt_serving_check DIRECTORY GGUF [--json FILE]

DIRECTORY holds store.tar.xz and expected.json of tests.gpu.prepare_tensorrt_serving, GGUF the joined parts of the model file. Exit
code 0: every prompt's greedy tokens are eager float32's, alone and in a batch of eight.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import torch

from compiler_service.ingest.gguf_model import open_gguf
from compiler_service.ingest.model import WEIGHTS_FILE
from compiler_service.ingest.safetensors_writer import write_safetensors
from shared.manifest import decode_model_manifest
from shared.pb.quire.v1 import control_pb2
from tests.bench.machine import write_json
from tests.e2e.conftest import Generated, Quire, start_quire, stop_quire


def restore_weights(component: Path, gguf: Path) -> None:
    """Write the weights the GGUF file holds, and compare them with the digest the compiler's manifest states."""
    opened = open_gguf(gguf)
    write_safetensors(component / WEIGHTS_FILE, opened.shapes, torch.float32, opened.tensors())
    manifest, _own_digest = (component / "manifest.json").read_bytes().splitlines()
    wanted = next(f for f in decode_model_manifest(manifest).files if f.path == WEIGHTS_FILE)
    with (component / WEIGHTS_FILE).open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != wanted.sha256:
        raise SystemExit(f"the weights made here have digest {got}, the manifest states {wanted.sha256}")


def serve(quire: Quire, expected: dict[str, list[list[int]]]) -> dict[str, object]:
    prompts, wanted = expected["prompts"], expected["tokens"]
    count = len(wanted[0])
    alone = [quire.greedy("smollm2", prompt, count) for prompt in prompts]
    first_deltas: list[float] = []

    def timed(prompt: list[int]) -> Generated:
        began, seen = time.monotonic(), []

        def on_event(event: object) -> None:
            if not seen:
                seen.append(time.monotonic() - began)

        result = quire.greedy("smollm2", prompt, count, on_event)
        first_deltas.extend(seen)
        return result

    together: dict[int, Generated] = {}
    threads = [threading.Thread(target=lambda i=i: together.__setitem__(i, timed(prompts[i]))) for i in range(len(prompts))]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    return {
        "prompts": len(prompts),
        "tokens_each": count,
        "alone_equal": sum(got.tokens == tokens for got, tokens in zip(alone, wanted, strict=True)),
        "batched_equal": sum(together[i].tokens == tokens for i, tokens in enumerate(wanted)),
        "batched_tokens_per_s": len(prompts) * count / seconds,
        "median_first_delta_s": sorted(first_deltas)[len(first_deltas) // 2],
        "text": alone[0].text,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    expected = json.loads((options.directory / "expected.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch)
        with tarfile.open(options.directory / "store.tar.xz") as archive:
            archive.extractall(data, filter="data")
        (manifest,) = (data / "artifacts").rglob(f"{expected['model_id']}/manifest.json")
        restore_weights(manifest.parent, options.gguf)
        quire = start_quire(data)
        try:
            began = time.monotonic()
            artifact = quire.artifact(expected["artifact_id"])
            with quire.session.control() as stub:  # as large a pool as the server chooses
                request = control_pb2.LoadEngineRequest(artifact_id=artifact.artifact_id, name="smollm2")
                engine = stub.LoadEngine(request).engine
            load_s = time.monotonic() - began
            results = serve(quire, expected) | {"load_s": load_s, "pages": engine.num_pages}
        finally:
            status = stop_quire(quire)
            print((data / "services.log").read_text()[-3000:], file=sys.stderr)
    right = results["alone_equal"] == results["batched_equal"] == results["prompts"] and status == 0
    print(json.dumps(results, indent=1))
    if options.json:
        write_json(options.json, results)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
