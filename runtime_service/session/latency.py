"""How long requests of one engine waited for what, in seconds of the loop's clock.

    submitted ──queue──► first step ──prefill──► first token ──decode──► end
    submitted ──────────first token────────────► first token

A request is counted once in each, however often it is preempted and whatever the number of its samples (BR-173): in `queue` if it
ever ran, in `first_token` and `prefill` if a token came out, in `decode` if one came out and it has ended. `inter_token` counts the
gaps between tokens of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime_service.core.histogram import Histogram, HistogramReading
from runtime_service.session.generation import Sample, Times
from shared.telemetry.buckets import DURATION_BOUNDS_S


@dataclass(frozen=True, slots=True)
class LatencyReadings:
    queue: HistogramReading
    prefill: HistogramReading
    decode: HistogramReading
    first_token: HistogramReading
    inter_token: HistogramReading


class Latencies:
    def __init__(self) -> None:
        self._queue, self._prefill, self._decode, self._first_token, self._inter_token = (
            Histogram(DURATION_BOUNDS_S) for _ in range(5)
        )

    def note_start(self, times: Times) -> None:
        """The first step of a request begins."""
        assert times.started is not None, times
        self._queue.observe(times.started - times.submitted)

    def note_token(self, sample: Sample, now: float, *, is_first: bool) -> None:
        """A token of `sample` has come out; `is_first`: of its request."""
        times = sample.generation.times
        if is_first:
            self._first_token.observe(now - times.submitted)
            self._prefill.observe(now - (times.submitted if times.started is None else times.started))
        elif sample.last_token is not None:
            self._inter_token.observe(now - sample.last_token)
        sample.last_token = now

    def note_end(self, times: Times, now: float) -> None:
        """A request has ended, in whatever way."""
        if times.first_token is not None:
            self._decode.observe(now - times.first_token)

    def read(self) -> LatencyReadings:
        return LatencyReadings(
            self._queue.read(), self._prefill.read(), self._decode.read(), self._first_token.read(), self._inter_token.read()
        )
