"""The serving loop: one thread that alone touches engines, pools and sequences.

Other threads meet it in two places. Into it go commands, through the inbox; out of it come events, through each request's stream.
What they share beside that (who is alive, what is loaded) is guarded by one lock, never held while an engine runs.

    turn     carry out the inbox -> one step of every session -> publish the load

An exception in one engine's step ends that engine's running requests and nothing else; one while a request is admitted ends that
request. An exception of the loop itself, and a device that is lost, end every stream with an error and show in `stalled_for_s`, so
a liveness probe fails instead of clients waiting in silence or being refused one by one.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import structlog
from tokenizers import Tokenizer

from runtime_service.core.request import GenerationRequest
from runtime_service.engine.engine import Engine
from runtime_service.inbox import Inbox
from runtime_service.session.generation import Generation
from runtime_service.session.load import LoadSnapshot
from runtime_service.session.session import EngineSession
from runtime_service.streaming.readers import Readers
from runtime_service.streaming.stream import TokenStream
from shared.errors import Draining, DuplicateRequest, InternalError, InUse, MemoryExhausted, ModelNotFound, QueueFull
from shared.ids import RequestId

_log = structlog.get_logger()
_BLOCKED_PAUSE_S = 0.01
"""Pause when requests are alive and none can step. No schedule should lead there; if one does, it must not burn a core."""


@dataclass(frozen=True, slots=True)
class DrainReport:
    """Of the requests alive when a drain began: how many reached their own end, how many were ended as retryable."""

    finished: int
    aborted: int


class ServingLoop:
    """Several engines, each with its own pool and scheduler, served in turns.

    `max_waiting` bounds the requests of one engine that have not had their first step. Every method may be called from any
    thread, but `turn`, which is the loop's own.
    """

    def __init__(self, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_waiting = max_waiting
        self._clock = clock
        self.readers = Readers()
        """Of every stream that is submitted."""
        self._inbox = Inbox()
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._sessions: dict[str, EngineSession] = {}
        self._removing: set[str] = set()
        self._alive: dict[RequestId, Generation] = {}
        self._arrivals = itertools.count()
        self._draining = False
        self._turned_away = 0
        """Requests that were ended as retryable; the loop's thread alone counts."""
        self._progress_at = clock()
        self._load = LoadSnapshot((), draining=False)
        self._thread = threading.Thread(target=self._serve, name="quire-serving-loop", daemon=True)

    # ---- lifecycle ----

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End what is alive as retryable, close the engines, join the thread. Idempotent."""
        with self._lock:
            self._draining = True
        self._inbox.post(self._shut_down)
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._inbox.carry_out()

    def drain(self, deadline_s: float) -> DrainReport:
        """Admit nothing more, let what is alive finish for `deadline_s` at most, end the rest as retryable. Blocks."""
        with self._lock:
            self._draining = True
            before, turned_away = len(self._alive), self._turned_away
            self._ended.wait_for(lambda: not self._alive, deadline_s)
        self._inbox.ask(lambda: self._end(list(self._sessions.values()), "the server is draining; send it to another one"))
        aborted = self._turned_away - turned_away  # by whatever drain or unload
        return DrainReport(before - aborted, aborted)

    # ---- engines ----

    def add_engine(self, name: str, engine: Engine, tokenizer: Tokenizer, num_pages: int, *, prefix_caching: bool = True) -> None:
        """Serve `engine` as `name` from a pool of `num_pages` pages, the dump page included; `prefix_caching` as in EngineSession.

        InUse if the name is taken, MemoryExhausted if the pool does not fit, EngineIncompatible or UnsupportedModel if the engine
        or its tokenizer cannot be served.
        """
        session = EngineSession(
            name,
            engine,
            tokenizer,
            num_pages,
            clock=self._clock,
            on_end=self._forget,
            deliver=self.readers.release,
            prefix_caching=prefix_caching,
        )
        with self._lock:
            self._check_up()
            if name in self._sessions:
                raise InUse(f"an engine named {name} is loaded; unload it or choose another name")
            self._sessions[name] = session
            self._publish_load()
        self._inbox.wake()

    def remove_engine(self, name: str, grace_s: float = 0.0) -> None:
        """Admit nothing more to an engine, wait `grace_s` for its requests, end the rest as retryable, free its memory. Blocks.

        ModelNotFound if it is not loaded, or being removed already.
        """
        with self._lock:
            session = self._find(name)
            self._removing.add(name)
            self._ended.wait_for(lambda: all(g.request.engine != name for g in self._alive.values()), grace_s)
        self._inbox.ask(lambda: self._remove(session))

    # ---- requests ----

    def submit(self, request: GenerationRequest, stream: TokenStream) -> None:
        """Accept a request, or raise and change nothing.

        Draining, ModelNotFound, FieldOutOfRange, KVExhausted (it could never run here), DuplicateRequest, QueueFull.
        """
        with self._lock:
            self._check_up()
            session = self._find(request.engine)
        session.check(request)
        generation = Generation.create(
            request,
            stream,
            arrivals=self._arrivals.__next__,
            vocabulary=session.vocabulary,
            model=session.model,
            now=self._clock(),
        )
        with self._lock:
            self._check_up()
            if self._find(request.engine) is not session:  # another was loaded under its name meanwhile
                raise ModelNotFound(f"engine {request.engine} was unloaded while the request was being checked; send it again")
            if request.request_id in self._alive:
                raise DuplicateRequest(f"request_id {request.request_id} is alive; choose another one")
            waiting = sum(g.request.engine == session.name and g.times.started is None for g in self._alive.values())
            if waiting >= self._max_waiting:
                raise QueueFull(
                    f"{waiting} requests wait for engine {session.name}, the most it keeps waiting; try again later",
                    retry_after_s=session.statistics.turnover.seconds,
                )
            if not self._alive:
                self._progress_at = self._clock()
            self._alive[request.request_id] = generation
            self._inbox.post(partial(self._admit, session, generation))

    def abort(self, request_id: RequestId) -> bool:
        """Cancel a request; it ends with what it has, as cancelled. False if no such request is alive."""
        with self._lock:
            generation = self._alive.get(request_id)
        if generation is None:
            return False
        generation.cancel_requested = True
        self._inbox.wake()
        return True

    # ---- readings ----

    def load(self) -> LoadSnapshot:
        """As of the end of the last turn, or of the last engine added."""
        return replace(self._load, draining=self._draining)

    def check_alive(self) -> None:
        """InternalError when the loop has died: its last readings say nothing any more."""
        if isinstance(self._inbox.closed, InternalError):
            raise self._inbox.closed

    def stalled_for_s(self) -> float:
        """Seconds without progress while requests are alive; 0 when idle, infinite when the loop has died."""
        if isinstance(self._inbox.closed, InternalError):
            return math.inf
        with self._lock:
            return self._clock() - self._progress_at if self._alive else 0.0

    # ---- the loop's own thread ----

    def turn(self) -> bool:
        """Carry out what came in, step every session once. False when no session had anything to do."""
        self._inbox.carry_out()
        stepped = [self._step(session) for session in list(self._sessions.values())]
        with self._lock:
            self._publish_load()
        if not any(session.is_ahead for session in self._sessions.values()):
            self.readers.release()  # else before the wait for what has been launched
        if any(stepped):
            self._progress_at = self._clock()
        return any(stepped)

    def _publish_load(self) -> None:
        """With the lock held, so that no older reading replaces a newer one."""
        self._load = LoadSnapshot(tuple(session.load() for session in self._sessions.values()), self._draining)

    def _serve(self) -> None:
        try:
            while self._inbox.closed is None:
                if not self.turn() and self._inbox.closed is None:
                    self._inbox.wait(_BLOCKED_PAUSE_S if self._alive else None)  # nothing alive: no deadline to keep
        except BaseException as error:  # noqa: BLE001 - nobody is above this frame; what is alive must not wait for ever
            _log.exception("serving_loop_died")
            self._die(error)

    def _admit(self, session: EngineSession, generation: Generation) -> None:
        try:
            session.admit(generation)
        except Exception as error:  # noqa: BLE001 - what one request cannot be given ends that request, never the loop
            _log.exception("admission_failed", engine=session.name)
            why = f"engine {session.name} could not prepare for the request: {type(error).__name__}: {error}"
            session.requests.end(generation, InternalError(why))

    def _step(self, session: EngineSession) -> bool:
        try:
            return session.step()
        except Exception as error:  # noqa: BLE001 - whatever an engine raises ends its own requests, never the loop
            _log.exception("step_failed", engine=session.name)
            unnamed = InternalError(f"a step of engine {session.name} failed: {type(error).__name__}: {error}")
            session.end_running(error if isinstance(error, MemoryExhausted) else unnamed)
        session.pool.check_device()  # one that is lost fails every step to come: that the loop must not outlive
        return True

    def _end(self, sessions: list[EngineSession], why: str) -> None:
        """End every generation of `sessions` as retryable."""
        for session in sessions:
            for generation in list(session.requests):
                self._turned_away += 1
                session.requests.end(generation, Draining(why))

    def _remove(self, session: EngineSession) -> None:
        self._end([session], f"engine {session.name} is being unloaded")
        with self._lock:
            del self._sessions[session.name]
            self._removing.discard(session.name)
        try:
            session.shut()
        except Exception:  # noqa: BLE001 - it serves nobody any more: its name is free, and others that are to be closed are closed
            _log.exception("engine_not_closed", engine=session.name)

    def _shut_down(self) -> None:
        for session in list(self._sessions.values()):
            self._remove(session)
        self._inbox.close(Draining("the server has stopped"))
        self.readers.release()

    def _die(self, error: BaseException) -> None:
        crash = InternalError(f"the serving loop has died: {type(error).__name__}: {error}")
        self._inbox.close(crash)
        with self._lock:
            alive, self._alive = list(self._alive.values()), {}
            self._ended.notify_all()
        for generation in alive:
            generation.fail(crash)
        self.readers.release()

    def _forget(self, generation: Generation) -> None:
        with self._lock:
            self._alive.pop(generation.request.request_id, None)
            self._ended.notify_all()

    # ---- shared with other threads ----

    def _find(self, name: str) -> EngineSession:
        session = self._sessions.get(name)
        if session is None or name in self._removing:
            loaded = ", ".join(other for other in self._sessions if other not in self._removing) or "none"
            raise ModelNotFound(f"no engine named {name} is loaded (loaded: {loaded}); load it or choose one of these")
        return session

    def _check_up(self) -> None:
        if self._inbox.closed is not None:
            raise self._inbox.closed
        if self._draining:
            raise Draining("the server is draining and admits nothing more; send it to another one")
