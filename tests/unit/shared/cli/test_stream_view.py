"""How a stream is shown."""

import pytest

from shared.cli.generate import StreamView
from shared.cli.session import Output, Session
from shared.errors import KVExhausted
from shared.pb.quire.v1 import common_pb2
from shared.pb.quire.v1 import inference_pb2 as pb


def delta(index, text):
    return pb.GenerateResponse(delta=pb.TokenDelta(index=index, text=text))


def finished(index):
    return pb.GenerateResponse(finished=pb.Finished(index=index, reason=pb.FINISH_REASON_LENGTH))


def shown(capsys, several, *events):
    view = StreamView(Session(Output.TEXT, "", "", None, None, None, None), several)
    for event in events:
        view.show(event)
    return capsys.readouterr()


def test_one_sample_streams(capsys):
    seen = shown(capsys, False, delta(0, "a"), delta(0, "b"), finished(0))
    assert (seen.out, seen.err) == ("ab\n", "finished: length\n")


def test_interleaved_samples_are_each_shown_whole(capsys):
    seen = shown(capsys, True, delta(0, "a"), delta(1, "x"), delta(0, "b"), finished(1), finished(0))
    assert seen.out == "--- sample 1, finished: length\nx\n--- sample 0, finished: length\nab\n"


def test_an_error_that_ends_the_stream_is_raised(capsys):
    with pytest.raises(KVExhausted):
        shown(capsys, False, pb.GenerateResponse(error=common_pb2.Error(reason="KV_EXHAUSTED", message="full")))
