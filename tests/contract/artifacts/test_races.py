"""Everybody at once: writers, readers, collectors, deleters and signers of a few artifacts, each as a process of its own sees
the store. What is opened is whole for as long as it is held, and nobody fails but by an answer: not there, or in use.

`QUIRE_STORE_OPERATIONS` says how many each of them does.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shared.artifacts.bucket import Bucket
from shared.artifacts.store import ArtifactStore
from shared.errors import ArtifactNotFound, InUse
from tests.support.artifact_stores import FILES, Backend, publish

OPERATIONS = int(os.environ.get("QUIRE_STORE_OPERATIONS", "25"))
PARTIES = 6
MODELS, ENGINES = ("a" * 64, "b" * 64), ("c" * 64, "d" * 64)


def act(store: ArtifactStore, rng: random.Random) -> str:
    artifact_id = rng.choice(MODELS + ENGINES)
    verb = rng.choice(["publish", "publish", "open", "open", "verify", "collect", "collect", "delete", "sign", "list"])
    match verb:
        case "publish":
            publish(store, artifact_id, FILES, model_id=MODELS[0] if artifact_id in ENGINES else None)
        case "open":
            with store.open(artifact_id) as handle:
                for _ in range(2):
                    assert {name: path.read_bytes() for name, path in handle.paths.items()} == FILES
        case "verify":
            store.verify(artifact_id)
        case "collect":
            store.gc(max_bytes=rng.choice([0, None]), max_age_s=rng.choice([0.0, None, 100.0]))
        case "delete":
            store.delete(artifact_id)
        case "sign":
            store.add_signature(artifact_id, b"signature")
        case "list":
            store.list()
    return verb


def test_nobody_takes_from_under_anybody(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, put_if = threading.Lock(), Bucket._put_if

    def put_if_atomically(*arguments: Any) -> bool:
        with lock:  # as S3 does; its stand-in looks first and puts then, in a thread a call
            return put_if(*arguments)

    monkeypatch.setattr(Bucket, "_put_if", put_if_atomically)
    stores = [backend.open() for _ in range(PARTIES)]

    def take_part(number: int) -> Counter[str]:
        rng, done = random.Random(number), Counter[str]()
        for _ in range(OPERATIONS):
            try:
                done[act(stores[number], rng)] += 1
            except (ArtifactNotFound, InUse) as error:
                done[error.reason] += 1
        return done

    with ThreadPoolExecutor(PARTIES) as parties:
        done = sum(parties.map(take_part, range(PARTIES)), Counter())
    assert done.total() == PARTIES * OPERATIONS
    store = backend.open()
    for info in store.list():
        store.verify(info.artifact_id)
    store.gc(max_bytes=0)
    assert store.list() == ()
