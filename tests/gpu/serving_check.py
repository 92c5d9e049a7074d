"""The services on a GPU against eager `transformers`: `python -m tests.gpu.serving_check MODEL.gguf [--json FILE]`.

SmolLM2-135M, compiled and served by `quire up` on this host. Prints one table; exit code 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compiler_service.ingest.digest import DigestCache
from compiler_service.pipeline import Workspace, build
from compiler_service.spec import CompileSpec, profile_set
from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.loader import EngineLoader
from runtime_service.kv.pool import KVPool
from shared.artifacts.local import LocalStore
from shared.gpu import compute_capability
from shared.ids import ArtifactId
from shared.kv_spec import Layout
from shared.manifest import decode_engine_manifest
from tests.bench.machine import gpu_alone, write_json
from tests.e2e.conftest import Quire, in_parallel, start_quire, stop_quire
from tests.e2e.hf_oracle import Oracle, Rounds
from tests.e2e.test_compaction_equals_oracle import TOWNS, chat
from tests.e2e.test_tokens_equal_transformers import MAX_TOKENS, PROMPTS

PROFILES = ("decode=32x1", "prefill=2x512")
NUM_PAGES = 1024
QUESTIONS = (
    ("How is bread made, from the grain to the loaf?", Rounds(budget=32, interval=16), 100),
    (f"{TOWNS} Tell the history of these towns.", Rounds(budget=96, interval=32), 120),
)


class Check:
    """The loaded engine, and what eager transformers says on the same GPU."""

    def __init__(self, quire: Quire, oracle: Oracle, engine: str) -> None:
        self.quire, self.oracle, self.engine = quire, oracle, engine
        with torch.device("cuda"):
            oracle.model.to("cuda")
            self.prompts = [oracle.tokenizer.encode(text) for text in PROMPTS]
            self.expected = [oracle.greedy(prompt, MAX_TOKENS).tokens for prompt in self.prompts]

    def alone(self) -> tuple[int, int]:
        got = [self.quire.greedy(self.engine, prompt, MAX_TOKENS).tokens for prompt in self.prompts]
        return sum(a == b for a, b in zip(got, self.expected, strict=True)), len(self.prompts)

    def mixed(self) -> tuple[int, int]:
        """200 requests at random moments, each for some of its prompt's tokens."""
        rng = random.Random(3)
        wanted = [(rng.randrange(len(self.prompts)), rng.randint(1, MAX_TOKENS)) for _ in range(200)]
        calls: list[Callable[[], object]] = [
            lambda i=i, n=n: self.quire.greedy(self.engine, self.prompts[i], n).tokens == self.expected[i][:n] for i, n in wanted
        ]
        right = in_parallel(calls, [rng.uniform(0, 5) for _ in calls])
        return sum(map(bool, right)), len(calls)

    def pages(self) -> tuple[int, int]:
        load = self.quire.engine_load(self.engine)
        return load.pages_free, load.pages_total

    def rounds(self) -> tuple[int, int]:
        """Tokens, and the numbers of rounds and evicted entries, of eager's cache pruned at the same moments."""
        right = 0
        for question, rounds, max_tokens in QUESTIONS:
            prompt = self.oracle.tokenizer.encode(chat(question))
            with torch.device("cuda"):
                expected = self.oracle.greedy(prompt, max_tokens, rounds=rounds)
            options = {"budget": rounds.budget, "interval": rounds.interval, "sinks": rounds.sinks}
            got = self.quire.greedy(self.engine, prompt, max_tokens, **options)
            counts = (got.usage.compaction_rounds, got.usage.tokens_evicted)
            right += got.tokens == expected.tokens and counts == (expected.rounds, expected.evicted)
        return right, len(QUESTIONS)


def serve(source: Path, data: Path) -> dict[str, Any]:
    """Rows of the table: check -> [got, wanted], or a traceback."""
    rows: dict[str, Any] = {}
    quire = start_quire(data, {"QUIRE_COMPILER_MODEL_ROOTS": str(source.resolve().parent)})
    try:
        options = {"page_size": 32, "profiles": PROFILES, "targets": (compute_capability(),)}
        artifact = quire.artifact(quire.compile(source, **options).artifact_id)
        quire.load(artifact.artifact_id, "smollm2", NUM_PAGES)
        (component,) = (path.parent for path in (data / "artifacts").rglob(f"{artifact.model_id}/config.json"))
        check = Check(quire, Oracle(component), "smollm2")
        with gpu_alone():
            for name in ("alone", "mixed", "rounds", "pages"):
                try:
                    rows[name] = list(getattr(check, name)())
                except Exception:  # noqa: BLE001 - one report of everything that fails
                    rows[name] = traceback.format_exc()
    finally:
        stop_quire(quire)
    return rows


@torch.inference_mode()
def least_bf16_cosine(source: Path, data: Path) -> float:
    """Logits after each prompt: the bfloat16 engine beside eager float32 transformers.

    Eager bfloat16 is no judge: its own rounding takes it as far from float32, and the two errors add up.
    """
    data.mkdir(parents=True, exist_ok=True)
    store = LocalStore(data / "artifacts")
    spec = CompileSpec(
        source=str(source),
        backend="inductor",
        layout=Layout.PAGED,
        dtype="bfloat16",
        max_len=2048,
        page_size=32,
        profiles=profile_set(PROFILES),
        targets=(compute_capability(),),
        allow_copying=False,
        constant_weights=False,
    )
    built = build(spec, Workspace(store, DigestCache(data / "digests.json"), None), lambda *_: None, lambda: None)
    model_id = ArtifactId(decode_engine_manifest(store.manifest(built.artifact_id)).model.model_id)
    engine = EngineLoader().load(store.open(built.artifact_id), store.open(model_id))
    pool = KVPool(engine.manifest.cache, 40, "cuda")
    with store.open(model_id) as model:
        oracle = Oracle(model.path("config.json").parent)
        eager = oracle.model.to("cuda")
    least = 1.0
    for text in PROMPTS:
        prompt = torch.tensor([oracle.tokenizer.encode(text)], dtype=torch.int32)
        count = prompt.shape[1]
        position, zero = torch.arange(count, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32)
        table = torch.arange(1, 20, dtype=torch.int32)[None]
        logits = engine.run(EngineInputs("prefill", prompt, position, zero, zero + count - 1, table), pool)
        wanted = eager(input_ids=prompt.long().cuda(), use_cache=False).logits[:, -1].float()
        least = min(least, float(torch.cosine_similarity(logits, wanted).min()))
    engine.close()
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", ".")) / "serving.json")
    parser.add_argument("--data", type=Path, default=Path("/tmp/quire-serving-check"))
    parser.add_argument("--bf16", action="store_true", help="print the bfloat16 engine's least cosine and nothing else")
    arguments = parser.parse_args()
    if arguments.bf16:
        print(json.dumps(least_bf16_cosine(arguments.source, arguments.data / "bf16")))
        return
    # The bfloat16 engine is built in a process of its own, while the services build the other.
    command = [sys.executable, "-m", "tests.gpu.serving_check", str(arguments.source), "--bf16", "--data", str(arguments.data)]
    half = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        rows = serve(arguments.source, arguments.data / "services")
    except Exception:  # noqa: BLE001 - the other half is reported all the same
        rows = {"services": traceback.format_exc()}
    out, _ = half.communicate()
    cosine = json.loads(out.splitlines()[-1]) if half.returncode == 0 else 0.0
    held = {name: isinstance(row, list) and row[0] == row[1] for name, row in rows.items()}
    held["bf16"] = cosine >= 0.999
    for name, row in {**rows, "bf16": f"least cosine {cosine:.6f}"}.items():
        print(f"{'ok ' if held[name] else 'BAD'} {name}: {row}", flush=True)
    write_json(arguments.json, {"rows": rows, "bf16_least_cosine": cosine})
    sys.exit(not all(held.values()))


if __name__ == "__main__":
    main()
