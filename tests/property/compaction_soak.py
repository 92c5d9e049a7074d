"""The long soak: rounds of every kind on real serving sessions, while requests share prefixes, fork, are preempted and cancelled.

    python -m tests.property.compaction_soak --rounds 10000

Prompts begin alike, and some go on from an answer. Pools are so short that rounds run early, cached pages are evicted and sequences
are recomputed. After every turn: blank + cached + used = all pages, and so in the draft's pool; no page is owned twice by one
sequence or written by two; every entry's key is that of the token which the map says it is, in each head, and every page that is
offered to later requests holds the keys of its tokens. At its end every request has its own right tokens, all of them or, if it was
ended, the first of them. Ends at the first fault; the seed reproduces it.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence as Ordered
from typing import TypeVar

import numpy as np
import torch

from runtime_service.core.params import CompactionParams, SamplingParams
from runtime_service.core.sequence import Sequence
from runtime_service.loop import ServingLoop
from runtime_service.session.session import EngineSession
from runtime_service.streaming.events import Finished, FinishReason
from shared.errors import QueueFull
from shared.kernels.compaction.modes import Mode
from shared.kv_spec import Layout
from tests.support.drafted import attach_draft
from tests.support.entries import keys_of
from tests.support.prefixes import check_prefixes, first_keys
from tests.support.serving import RecordingStream, request, rounds_of, run, submit
from tests.support.tiny_engine import KV_HEADS, VOCAB, Oracle, TinyEngine, TinyModel, tiny_tokenizer

_T = TypeVar("_T")

POLICIES = {
    "paged": ("sink_recent", "knorm", "knorm_per_head", "knorm_per_layer_head"),
    "linear": ("knorm", "knorm_per_layer_head"),
    "sliding": ("sink_recent", "knorm", "knorm_per_head"),
    "drafted": ("sink_recent", "knorm"),
}
NUM_PAGES = {"paged": 18, "linear": 4, "sliding": 18, "drafted": 14}


class Soak:
    """Engines of every kind of cache behind one loop. AssertionError at the first fault."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.models = {name: TinyModel(seed=seed % 7, window=5 if name == "sliding" else None) for name in POLICIES}
        self.loop = ServingLoop(max_waiting=6)
        self.requests: list[RecordingStream] = []
        self.conversations = [self.rng.integers(0, VOCAB, 23).tolist() for _ in range(2)]
        self.cancelled = self.finished = 0
        for name, model in self.models.items():
            layout = Layout.LINEAR if name == "linear" else Layout.PAGED
            engine = TinyEngine(model, layout=layout, max_len=48, profiles=("decode=4x1", "prefill=2x6"))
            self.loop.add_engine(name, engine, tiny_tokenizer(), NUM_PAGES[name])
            if name == "drafted":
                _, self.writer = attach_draft(self.loop, name, engine, NUM_PAGES[name])

    @property
    def sessions(self) -> dict[str, EngineSession]:
        return self.loop._sessions

    @property
    def rounds(self) -> int:
        return sum(session.compactor.evidence.rounds for session in self.sessions.values())

    @property
    def hits(self) -> int:
        """Prompt tokens that were found computed."""
        return sum(session.statistics.prefix_hits for session in self.sessions.values())

    def run(self, rounds: int) -> None:
        """Serve until `rounds` have run since the start, then until nothing is alive."""
        while self.rounds < rounds:
            self.submit()
            for _ in range(int(self.rng.integers(1, 6))):
                self.loop.turn()
                self.check_memory()
            self.disturb()
            self.collect()
        run(self.loop)
        self.collect()
        assert not self.requests
        for name, session in self.sessions.items():
            assert (session.allocator.num_used, session.statistics.pages_leaked) == (0, 0), name
        assert self.writer.draft.allocator.num_used == 0

    def submit(self) -> None:
        for name in POLICIES:
            mode = self.choose(list(Mode)) if name != "sliding" else Mode.ORDERED
            budget = int(self.rng.integers(6, 11))
            interval, sinks = int(self.rng.integers(1, 5)), int(self.rng.integers(0, 4))
            compaction = CompactionParams(self.choose(POLICIES[name]), budget, interval, sinks, mode)
            samples = self.choose([1, 1, 1, 2, 3])
            made = request(
                self.prompt(),
                int(self.rng.integers(1, 24)),
                engine=name,
                sampling=SamplingParams(temperature=0.0, n=samples),
                compaction=self.choose([compaction] * 5 + [None]),
                priority=self.choose([0, 0, 1]),
                cache_salt=self.choose([""] * 7 + ["other"]),
            )
            try:
                self.requests += submit(self.loop, made)
            except QueueFull:
                continue

    def prompt(self) -> list[int]:
        """Up to 23 tokens: the first of a conversation, and some that are nobody else's."""
        shared = self.choose(self.conversations)[: int(self.rng.integers(0, 23))]
        return [*shared, *self.rng.integers(0, VOCAB, int(self.rng.integers(1, 24 - len(shared)))).tolist()]

    def disturb(self) -> None:
        """Cancel one request, preempt one sequence, compact one before it is due; each now and then."""
        running = [(session, sequence) for session in self.sessions.values() for sequence in session.scheduler.running]
        if running and self.rng.random() < 0.3:
            self.loop.abort(self.choose(running)[1].request.request_id)
            self.cancelled += 1
        if running and self.rng.random() < 0.3:
            session, sequence = self.choose(running)
            session.scheduler.preempt(sequence)
        early = [(session, s) for session in self.sessions.values() for s in session.scheduler.running if may_be_compacted(s)]
        if early and self.rng.random() < 0.3:
            session, sequence = self.choose(early)
            session.compactor.run([sequence])
        self.check_memory()

    def check_memory(self) -> None:
        self.writer.check()
        for name, session in self.sessions.items():
            session.allocator.check_integrity()
            page_size = session.pool.spec.page_size
            owned = Counter(page for sequence in session.scheduler.running for page in sequence.pages)
            assert owned == {page: count for page, count in enumerate(session.allocator._references) if count}
            num_blank = session.allocator.num_free - session.allocator.num_cached
            assert num_blank + session.allocator.num_cached + len(owned) == session.allocator.capacity
            check_prefixes(session, self.models[name])
            for sequence in session.scheduler.running:
                assert len(set(sequence.pages)) == len(sequence.pages)
                assert not any(map(session.allocator.is_shared, sequence.pages[sequence.physical_len // page_size :]))
                if sequence.physical_len:
                    self.check_entries(name, session, sequence)

    def check_entries(self, name: str, session: EngineSession, sequence: Sequence) -> None:
        """The keys of layer 0, which depend on token and position alone, are those the map says lie there."""
        positions = np.broadcast_to(sequence.positions[:KV_HEADS], (KV_HEADS, sequence.physical_len))
        keys_HTD = first_keys(self.models[name], tuple(sequence.tokens[: sequence.computed]))
        expected = torch.stack([keys[torch.from_numpy(row).long()] for keys, row in zip(keys_HTD, positions.copy(), strict=True)])
        got = keys_of(session.pool, 0, sequence.pages, sequence.physical_len)
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6), (name, sequence)

    def collect(self) -> None:
        """Check and forget the requests that have ended."""
        for stream in [stream for stream in self.requests if stream.is_ended]:
            self.requests.remove(stream)
            self.finished += 1
            if stream.tokens() and self.rng.random() < 0.1:
                said = [*stream.sequences[0].request.prompt_ids, *stream.tokens()]
                self.conversations[int(self.rng.integers(len(self.conversations)))] = said
            assert stream.after_end == []
            for index, sequence in enumerate(stream.sequences):
                wanted = sequence.request
                tokens = stream.tokens(index)
                expected = Oracle(self.models[wanted.engine]).expected_tokens(
                    wanted.prompt_ids, max(1, len(tokens)), rounds_of(sequence)
                )
                assert tokens == expected[: len(tokens)], sequence
                reasons = [event.reason for event in stream.events if isinstance(event, Finished) and event.index == index]
                assert reasons in ([FinishReason.LENGTH], [FinishReason.CANCELLED]), reasons
                assert (len(tokens) == wanted.stop.max_tokens) == (reasons == [FinishReason.LENGTH])

    def choose(self, options: Ordered[_T]) -> _T:
        return options[int(self.rng.integers(len(options)))]


def may_be_compacted(sequence: Sequence) -> bool:
    compaction = sequence.request.compaction
    return compaction is not None and sequence.remaining == 1 and sequence.physical_len > compaction.budget


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.monotonic()
    soak = Soak(arguments.seed)
    for target in [*range(1000, arguments.rounds, 1000), arguments.rounds]:
        soak.run(target)
        evidence = sum(session.compactor.evidence.tokens_evicted for session in soak.sessions.values())
        preemptions = sum(session.scheduler.num_preemptions for session in soak.sessions.values())
        print(
            f"{soak.rounds} rounds, {evidence} tokens evicted, {soak.finished} requests, {soak.cancelled} cancels, "
            f"{preemptions} preemptions, {soak.hits} prompt tokens found in the cache: no page lost, outputs right, "
            f"{time.monotonic() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
