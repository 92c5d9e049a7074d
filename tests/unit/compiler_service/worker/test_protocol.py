"""Lines between service and build process: one JSON object each, read back strictly."""

import pytest
from pydantic import ValidationError

from compiler_service.worker.protocol import (
    AskToPublish,
    Built,
    Explained,
    Failed,
    Keyed,
    Progress,
    Request,
    Verb,
    decode_message,
    decode_request,
    encode,
)
from shared.artifacts.locate import StoreLocation
from shared.jobs.job import JobError
from tests.support.fake_build import CERTIFICATE

MESSAGES = [
    Progress("build", 0.5, "line\nbreak \u2028 and 漢字"),
    AskToPublish(),
    Built("a" * 64, reused=False),
    Explained((CERTIFICATE,)),
    Explained(()),
    Keyed({"weights": "a" * 64}),
    Failed(JobError("SOURCE_INVALID", "no", details={"shard": "2"})),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_is_one_line_and_comes_back(message):
    line = encode(message)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode_message(line) == message


def test_a_request_comes_back():
    request = Request(Verb.EXPLAIN, '{"source":"m"}', StoreLocation("/store", "/cache", 1 << 30), "/digests", ("/models", "/more"))
    assert decode_request(encode(request)) == request


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"null", b'{"kind":"built"}', b'{"kind":"boast"}', encode(MESSAGES[0])[:-3], b'{"kind":"ask_to_publish","x":1}'],
)
def test_what_is_no_message(line):
    with pytest.raises(ValidationError):
        decode_message(line)
