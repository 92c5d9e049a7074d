"""Following a job through outages of its service."""

import itertools

import grpc
import pytest

from shared.cli import watch
from shared.pb.quire.v1 import compiler_pb2 as pb


class Failure(grpc.RpcError):
    def __init__(self, code):
        self._code = code

    def code(self):
        return self._code

    def details(self):
        return "connection lost"

    def trailing_metadata(self):
        return ()


AWAY, GONE = Failure(grpc.StatusCode.UNAVAILABLE), Failure(grpc.StatusCode.NOT_FOUND)


class Call:
    def __init__(self, script):
        self._script, self.cancelled = script, False

    def __iter__(self):
        for item in self._script:
            if isinstance(item, Exception):
                raise item
            yield pb.WatchCompileJobResponse(event=pb.JobEvent(sequence=item))

    def cancel(self):
        self.cancelled = True


class Stub:
    """Each watch plays the next script: sequence numbers, then maybe an error."""

    def __init__(self, *scripts):
        self._scripts = iter(scripts)
        self.asked, self.calls = [], []

    def WatchCompileJob(self, request):
        self.asked.append(request.after_sequence)
        self.calls.append(Call(next(self._scripts)))
        return self.calls[-1]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(watch, "RESUME_EVERY_S", 0.0)


def sequences(stub, after=0):
    return [event.sequence for event in watch.events_of(stub, "job", after)]


def test_it_goes_on_where_it_broke_off():
    stub = Stub([3, 4, AWAY], [AWAY], [5, AWAY], [6, 7])
    assert sequences(stub, 2) == [3, 4, 5, 6, 7]
    assert stub.asked == [2, 4, 4, 5]
    assert all(call.cancelled for call in stub.calls), "no call is left behind"


def test_a_service_that_was_never_there_is_told_at_once():
    with pytest.raises(grpc.RpcError):
        sequences(Stub([AWAY], [1]))


def test_other_failures_are_not_repeated():
    with pytest.raises(grpc.RpcError):
        sequences(Stub([1, GONE], [2]))


def test_an_outage_without_end_is_told(monkeypatch):
    clock = itertools.count(step=watch.MAX_OUTAGE_S / 4)
    monkeypatch.setattr(watch.time, "monotonic", lambda: 1.0 + next(clock))
    stub = Stub([1, AWAY], *[[AWAY]] * 20)
    with pytest.raises(grpc.RpcError):
        sequences(stub)
    assert 2 < len(stub.asked) < 10


def test_a_long_watch_that_ends_with_its_connection_is_no_outage(monkeypatch):
    """The server closes connections that are old; a build may say nothing for longer than that."""
    clock = itertools.count(step=watch.MAX_OUTAGE_S * 2)
    monkeypatch.setattr(watch.time, "monotonic", lambda: 1.0 + next(clock))
    assert sequences(Stub([AWAY], [AWAY], [AWAY], [5]), 4) == [5]
