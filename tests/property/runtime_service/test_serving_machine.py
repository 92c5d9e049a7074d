"""Random interleavings of everything that can happen to the real serving loop.

Requests come, begin alike, go on from an earlier answer, are cancelled, miss deadlines, lose their readers, are compacted and
preempted at any moment; whatever a step is made of fails; engines are unloaded and loaded again, and drained at last. Pages hold
one token, a whole sequence or something between, and pools hardly more than one sequence. Whatever the order: pages return to the
baseline, what is offered to later requests holds what it says, every stream ends once, and every request gets its own tokens: all
of them if it finished, the first of them if it was ended. Only who is at fault is ended by a fault.

The loop's thread is not started; its turns are rules like the others, so an interleaving is a value that hypothesis can shrink.
`QUIRE_INTERLEAVINGS=1000` runs a thousand of them.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from unittest import mock

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime_service.core.params import CompactionParams, SamplingParams
from runtime_service.core.request import GenerationRequest
from runtime_service.core.sequence import Sequence, Status
from runtime_service.device_sampling import DrawnTokens
from runtime_service.loop import ServingLoop
from runtime_service.sampling import SamplerState, sample
from runtime_service.session import flight as flight_module
from runtime_service.session.session import EngineSession
from runtime_service.streaming.events import Failure, Finished, FinishReason
from shared.errors import FieldOutOfRange, InternalError, KVExhausted, QueueFull
from shared.kernels.compaction.modes import Mode
from shared.kv_spec import Layout
from tests.support.prefixes import check_prefixes
from tests.support.serving import RecordingStream, request, rounds_of, run, submit
from tests.support.tiny_engine import VOCAB, Oracle, Round, TinyEngine, TinyModel, tiny_tokenizer

INTERLEAVINGS = int(os.environ.get("QUIRE_INTERLEAVINGS", "20"))
SYSTEM = tuple(range(30, 53))
PROMPTS = ((1, 2, 3), (7,) * 11, (5,), SYSTEM, (9, 8, 7, 6), SYSTEM[:16], (*SYSTEM[:13], 1, 2, 3), SYSTEM[:9] + (5,) * 8)
MODELS = {"paged": TinyModel(), "linear": TinyModel(seed=1), "sliding": TinyModel(seed=2, window=5)}
MAX_LEN = 48
GREEDY = SamplingParams(temperature=0.0)
EXTREMES = (
    SamplingParams(temperature=1.1e-5, seed=1),
    SamplingParams(temperature=10.0, seed=2**64 - 1, top_p=1e-30),
    SamplingParams(temperature=1.0, seed=0, top_k=2**31 - 1, min_p=0.999),
    SamplingParams(temperature=1.0, seed=5, repetition_penalty=1e-30, frequency_penalty=-2.0),
    SamplingParams(temperature=0.0, repetition_penalty=10.0, presence_penalty=2.0),
    SamplingParams(temperature=0.0, logprobs=20, n=2),
)
RARELY = st.sampled_from([False] * 4 + [True])
"""For what ends everything an engine does: else little would live long enough to meet anything."""


class Fault(Exception):
    """Raised on purpose."""


@dataclass(frozen=True)
class Shape:
    """Of the paged pools: tokens a page holds, and tokens the pages hold together, rounded up."""

    page_size: int
    tokens: int

    @property
    def num_pages(self) -> int:
        return 1 + -(-self.tokens // self.page_size)


def make_engine(name: str, ahead: bool, shape: Shape) -> TinyEngine:
    return TinyEngine(
        MODELS[name],
        layout=Layout.LINEAR if name == "linear" else Layout.PAGED,
        page_size=shape.page_size,
        max_len=MAX_LEN,
        profiles=("decode=4x1", "prefill=2x6"),
        runs_ahead=ahead,
    )


@lru_cache(maxsize=4096)
def expected_tokens(
    engine: str, prompt: tuple[int, ...], count: int, rounds: tuple[Round, ...], sampling: SamplingParams, index: int
) -> list[int]:
    state = SamplerState.create(sampling, prompt, vocab_size=VOCAB, sample_index=index)

    def choose(logits: np.ndarray) -> int:
        (token,) = sample(torch.from_numpy(logits)[None], [state])
        assert not isinstance(token, InternalError)
        return token.token_id

    return Oracle(MODELS[engine]).expected_tokens(prompt, count, rounds, choose)


@dataclass(eq=False)
class Live:
    request: GenerationRequest
    stream: RecordingStream
    disconnected: bool = False


SEAMS: dict[str, Callable[[EngineSession], tuple[object, str]]] = {
    "engine": lambda session: (session._engine, "run"),
    "device sampler": lambda _: (flight_module, "draw_tokens"),
    "host sampler": lambda _: (flight_module, "sample"),
    "tokens' arrival": lambda _: (DrawnTokens, "wait"),
    "detokenizer": lambda session: (session.vocabulary, "piece"),
    "policy": lambda session: (session.compactor, "_policy"),
    "mover": lambda session: (session.compactor._executor, "execute"),
    "copies": lambda session: (session.compactor._caches[0].copies, "run"),
    "allocator": lambda session: (session.allocator, "try_allocate"),
    "prefixes": lambda session: (session.allocator, "find"),
}
COST_ONE = {"detokenizer", "policy"}


@contextmanager
def fault_at(seam: tuple[object, str], call: int) -> Iterator[Callable[[], bool]]:
    """The `call`-th call of a function raises; yields whether it has."""
    owner, name = seam
    genuine, calls = getattr(owner, name), itertools.count(1)
    happened = False

    def failing(*arguments: object, **options: object) -> object:
        nonlocal happened
        if next(calls) == call:
            happened = True
            raise Fault(name)
        return genuine(*arguments, **options)

    with mock.patch.object(owner, name, failing):
        yield lambda: happened


@st.composite
def orders(draw: st.DrawFn) -> dict[str, object]:
    """What one request asks for; deadlines in seconds from now, and one turn takes a second."""
    compaction = st.builds(
        CompactionParams,
        policy=st.sampled_from(["sink_recent", "knorm", "knorm_per_head", "knorm_per_layer_head"]),
        budget=st.sampled_from([4, 5, 6, 7, 8, 9, 10]),
        interval=st.integers(1, 12),
        sinks=st.integers(0, 3),
        mode=st.sampled_from(Mode),
    )
    sampled = st.builds(SamplingParams, temperature=st.just(1.0), seed=st.integers(0, 3), n=st.integers(1, 3))
    rarely = draw(st.integers(0, 5)) == 0
    engine = draw(st.sampled_from(["paged", "paged", "sliding", "sliding", "linear"]))
    chosen = draw(st.one_of(compaction, compaction, st.none()))
    if chosen is not None and engine == "sliding":
        chosen = replace(chosen, mode=Mode.ORDERED)  # the other is refused: windows are masked by the order of cells
    return {
        "prompt": draw(st.sampled_from(PROMPTS)),
        "max_tokens": draw(st.integers(1, 26)),
        "engine": engine,
        "compaction": chosen,
        "sampling": draw(st.one_of(st.just(GREEDY), st.just(GREEDY), sampled, st.sampled_from(EXTREMES))),
        "stop_token_ids": draw(st.sampled_from([(), (), (), tuple(range(0, VOCAB, 5))])),
        "priority": draw(st.integers(-1, 1)),
        "cache_salt": draw(st.sampled_from(["", "", "", "other"])),
        "queue_deadline": draw(st.integers(1, 40)) if rarely else None,
        "run_deadline": draw(st.integers(1, 60)) if rarely else None,
    }


class ServingMachine(RuleBasedStateMachine):
    @initialize(
        first=st.lists(orders(), min_size=4, max_size=8),
        ahead=st.booleans(),
        shape=st.builds(Shape, st.sampled_from([4, 4, 4, 1, 3, 8, MAX_LEN]), st.sampled_from([48, 48, 48, 52, 49, 24, 96])),
    )
    def start(self, first: list[dict[str, object]], ahead: bool, shape: Shape) -> None:
        self.ahead, self.shape = ahead, shape
        self.now = 0.0
        self.loop = ServingLoop(max_waiting=8, clock=lambda: self.now)
        self.all: list[Live] = []
        self.engines: dict[str, TinyEngine] = {}
        for name in MODELS:
            self.load(name)
        self.generate(first)

    def load(self, name: str) -> None:
        self.engines[name] = make_engine(name, self.ahead, self.shape)
        self.loop.add_engine(name, self.engines[name], tiny_tokenizer(), 3 if name == "linear" else self.shape.num_pages)

    def session(self, name: str) -> EngineSession:
        return self.loop._sessions[name]

    def alive(self) -> list[Live]:
        return [live for live in self.all if live.request.request_id in self.loop._alive]

    def running(self) -> list[tuple[EngineSession, Sequence]]:
        return [(session, s) for session in self.loop._sessions.values() for s in session.scheduler.running]

    # ---- what may happen ----

    @rule(wanted=st.lists(orders(), min_size=1, max_size=4))
    def generate(self, wanted: list[dict[str, object]]) -> None:
        for order in wanted:
            deadlines = {
                name: None if order[name] is None else self.now + order[name] for name in ("queue_deadline", "run_deadline")
            }
            made = request(**(order | deadlines))
            try:
                (stream,) = submit(self.loop, made)
            except (QueueFull, FieldOutOfRange, KVExhausted):
                continue
            self.all.append(Live(made, stream))

    @precondition(lambda self: any(answered(live) for live in self.all))
    @rule(data=st.data(), order=orders(), more=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3))
    def go_on_from_an_answer(self, data: st.DataObject, order: dict[str, object], more: list[int]) -> None:
        live = data.draw(st.sampled_from([live for live in self.all if answered(live)]))
        prompt = (*live.request.prompt_ids, *live.stream.tokens(), *more)[: data.draw(st.sampled_from([23, 23, 24, 40, MAX_LEN]))]
        self.generate([order | {"prompt": prompt, "cache_salt": live.request.cache_salt}])

    @rule(turns=st.integers(1, 30))
    def take_turns(self, turns: int) -> None:
        for _ in range(turns):
            self.loop.turn()
            self.now += 1.0

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        assert self.loop.abort(data.draw(st.sampled_from(self.alive())).request.request_id)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def cancel_during_a_step(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.alive()))
        engine = self.engines[live.request.engine]
        engine.on_run = lambda inputs: self.loop.abort(live.request.request_id)
        self.loop.turn()
        engine.on_run = None

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.alive()))
        live.disconnected = True
        live.stream.close()

    @rule(seconds=st.integers(1, 20))
    def let_time_pass(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        session, sequence = data.draw(st.sampled_from(self.running()))
        session.scheduler.preempt(sequence)

    @precondition(lambda self: any(may_be_compacted(s) for _, s in self.running()))
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        session, sequence = data.draw(st.sampled_from([(e, s) for e, s in self.running() if may_be_compacted(s)]))
        before = (list(sequence.pages), sequence.positions.tolist(), session.allocator.num_free)
        if not session.compactor.run([sequence]):  # it shares a page it would write to, and none is free for the copy
            assert any(session.allocator.is_shared(page) for page in sequence.pages)
            assert (sequence.pages, sequence.positions.tolist(), session.allocator.num_free) == before

    @rule(engine=st.sampled_from(sorted(MODELS)), seam=st.sampled_from(sorted(SEAMS)), call=st.integers(1, 3), really=RARELY)
    def fail_at_a_seam(self, engine: str, seam: str, call: int, really: bool) -> None:
        """The given call of a function fails, if it comes within some turns."""
        if not really:
            return
        failed = self.failed()
        with fault_at(SEAMS[seam](self.session(engine)), call) as happened:
            for _ in range(4):
                self.loop.turn()
                if happened():
                    break
        lost = self.failed() - failed
        assert len({live.request.engine for live in lost}) <= 1
        if seam in COST_ONE:
            assert len(lost) <= 1
        assert all("Fault" in str(live.stream.error) for live in lost)

    def failed(self) -> set[Live]:
        """By our own fault: deadlines are theirs."""
        ended = [live for live in self.all if live.stream.events and isinstance(live.stream.events[-1], Failure)]
        return {live for live in ended if isinstance(live.stream.error, InternalError)}

    @rule(engine=st.sampled_from(sorted(MODELS)), really=RARELY)
    def unload_and_load_again(self, engine: str, really: bool) -> None:
        if not really:
            return
        thread = threading.Thread(target=self.loop.remove_engine, args=(engine,))
        thread.start()
        while thread.is_alive():
            self.loop._inbox.carry_out()  # a turn would step the other engines, as often as this thread happens to take
            thread.join(0.0005)
        assert self.engines[engine].closed
        self.load(engine)

    # ---- what must hold ----

    @invariant()
    def pages_are_owned_by_what_runs_and_by_nothing_else(self) -> None:
        if not hasattr(self, "loop"):
            return
        for session in self.loop._sessions.values():
            session.allocator.check_integrity()
            owned = Counter(page for sequence in session.scheduler.running for page in sequence.pages)
            assert owned == {page: count for page, count in enumerate(session.allocator._references) if count}
            for sequence in session.scheduler.running:
                assert sequence.physical_len <= sequence.request.max_physical
                page_size = session.pool.spec.page_size
                assert sequence.physical_len <= len(sequence.pages) * page_size
                assert not any(map(session.allocator.is_shared, sequence.pages[sequence.physical_len // page_size :]))
            check_prefixes(session, MODELS[session.name])

    @invariant()
    def no_stream_hears_anything_after_its_end(self) -> None:
        assert all(live.stream.after_end == [] for live in getattr(self, "all", []))

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        if self.now % 2:  # as good as a coin
            self.drain()
        run(self.loop)
        assert self.loop._alive == {}
        for load in self.loop.load().engines:
            assert (load.pages_free, load.pages_leaked) == (load.pages_total, 0)
            assert self.session(load.name).prefixes._reached == {}
        for live in self.all:
            check(live)
        self.loop.stop()

    def drain(self) -> None:
        thread = threading.Thread(target=self.loop.drain, args=(0.0,))
        thread.start()
        while thread.is_alive():
            self.loop._inbox.carry_out()
            thread.join(0.0005)


def answered(live: Live) -> bool:
    return bool(live.stream.tokens())


def may_be_compacted(sequence: Sequence) -> bool:
    compaction = sequence.request.compaction
    return compaction is not None and sequence.remaining == 1 and sequence.physical_len > compaction.budget


def check(live: Live) -> None:
    """One end, and of every sample the tokens that are its own."""
    wanted, stream = live.request, live.stream
    assert live.disconnected or stream.is_ended
    for index, sequence in enumerate(stream.sequences):
        assert (sequence.status, sequence.pages) == (Status.FINISHED, [])
        tokens = stream.tokens(index)
        expected = expected_tokens(
            wanted.engine, wanted.prompt_ids, wanted.stop.max_tokens, tuple(rounds_of(sequence)), wanted.sampling, index
        )
        ends = [event for event in stream.events if isinstance(event, Finished) and event.index == index]
        assert len(ends) <= 1
        stopped = [token in wanted.stop.stop_token_ids for token in tokens]
        assert not any(stopped[:-1])
        if ends and ends[0].reason is FinishReason.LENGTH:
            assert tokens == expected
        elif ends and ends[0].reason is FinishReason.STOP:
            assert tokens == expected[: len(tokens)]
            assert stopped[-1]
        else:
            assert tokens == expected[: len(tokens)]
            assert len(tokens) < wanted.stop.max_tokens
        for round_ in rounds_of(sequence):
            for kept in round_.heads or (round_.kept,):
                assert len(kept) == wanted.compaction.budget
                assert kept[: wanted.compaction.sinks] == tuple(range(wanted.compaction.sinks))


TestServing = ServingMachine.TestCase
TestServing.settings = settings(
    max_examples=INTERLEAVINGS, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
