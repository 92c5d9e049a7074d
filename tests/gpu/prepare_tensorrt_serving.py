"""Prepare what tensorrt_serving_check serves on a GPU: SmolLM2-135M compiled to TensorRT-RTX here, and what eager torch says.

    python -m tests.gpu.prepare_tensorrt_serving DIRECTORY       some minutes on two cores

`store.tar.xz` holds the artifacts without the model's weights, 538 MB that follow from the GGUF file (98 MB), which is cut into
parts small enough to be carried one at a time; `expected.json` the prompts and float32 greedy tokens.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import time
from pathlib import Path

from compiler_service.ingest.digest import DigestCache
from compiler_service.ingest.model import WEIGHTS_FILE
from compiler_service.pipeline import Stage, Workspace, build
from compiler_service.spec import CompileSpec, profile_set
from shared.artifacts.local import LocalStore
from shared.cli.fetch import fetch_smollm2
from shared.kv_spec import Layout
from shared.manifest import decode_engine_manifest
from tests.e2e.conftest import CACHE
from tests.e2e.hf_oracle import Oracle
from tests.e2e.test_tokens_equal_transformers import PROMPTS

MAX_LEN, NEW_TOKENS, NUM_PROMPTS = 2048, 48, 8
PART_BYTES = 48 << 20


def compile_smollm2(store: LocalStore, digests: Path) -> str:
    """The artifact id of the engine."""
    spec = CompileSpec(
        source=str(fetch_smollm2(CACHE)),
        backend="tensorrt_rtx",
        layout=Layout.LINEAR,
        dtype="float32",
        max_len=MAX_LEN,
        page_size=MAX_LEN,
        profiles=profile_set(("decode=8x1", "prefill=1x128")),
        targets=("sm80",),
        allow_copying=False,
        constant_weights=False,
    )
    began = time.monotonic()

    def progress(stage: Stage, fraction: float, message: str) -> None:
        if fraction in (0.0, 1.0):
            print(f"{time.monotonic() - began:6.1f} s  {stage.value}: {message}", flush=True)

    return build(spec, Workspace(store, DigestCache(digests), None), progress, lambda: None).artifact_id


def expect(store: LocalStore, artifact_id: str) -> dict[str, object]:
    with store.open(artifact_id) as artifact:
        model_id = decode_engine_manifest(artifact.manifest_bytes).model.model_id
    with store.open(model_id) as model:
        oracle = Oracle(model.path(WEIGHTS_FILE).parent)
        prompts = [oracle.tokenizer.encode(text) for text in PROMPTS[:NUM_PROMPTS]]
        tokens = [oracle.greedy(prompt, NEW_TOKENS).tokens for prompt in prompts]
    return {"artifact_id": artifact_id, "model_id": model_id, "prompts": prompts, "tokens": tokens}


def pack(directory: Path) -> None:
    source = fetch_smollm2(CACHE)
    with tarfile.open(directory / "store.tar.xz", "w:xz") as archive:
        archive.add(directory / "artifacts", "artifacts", filter=lambda info: None if info.name.endswith(WEIGHTS_FILE) else info)
    shutil.rmtree(directory / "artifacts")
    with source.open("rb") as file:
        for number, part in enumerate(iter(lambda: file.read(PART_BYTES), b"")):
            (directory / f"part{number}").mkdir()
            (directory / f"part{number}" / "gguf").write_bytes(part)


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True)
    store = LocalStore(directory / "artifacts")
    expected = expect(store, compile_smollm2(store, directory / "digests"))
    (directory / "expected.json").write_text(json.dumps(expected))
    pack(directory)


if __name__ == "__main__":
    main()
