"""Every error class has a status, and survives the trip to the client and back."""

import grpc
import pytest
from google.rpc import error_details_pb2

from shared import errors
from shared.rpc import status


def leaves(kind=errors.QuireError):
    children = kind.__subclasses__()
    return [c for child in children for c in leaves(child)] if children else [kind]


def every_class(kind=errors.QuireError):
    return [kind, *(c for child in kind.__subclasses__() for c in every_class(child))]


@pytest.mark.parametrize("kind", every_class()[1:], ids=lambda k: k.__name__)
def test_every_class_has_a_status(kind):
    assert status.code_of(kind) is not grpc.StatusCode.OK


def test_reasons_are_unique():
    reasons = [k.reason for k in every_class()[1:]]
    assert sorted(reasons) == sorted(set(reasons))


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = [line.split("── ")[1].split()[0] for line in errors.__doc__.splitlines() if "── " in line]
    assert sorted(drawn) == sorted(k.__name__ for k in every_class()[1:])


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.FieldOutOfRange, "INVALID_ARGUMENT"),
        (errors.ModelNotFound, "NOT_FOUND"),
        (errors.DuplicateRequest, "ALREADY_EXISTS"),
        (errors.EngineIncompatible, "FAILED_PRECONDITION"),
        (errors.QueueFull, "RESOURCE_EXHAUSTED"),
        (errors.KVExhausted, "RESOURCE_EXHAUSTED"),
        (errors.MessageTooLarge, "RESOURCE_EXHAUSTED"),
        (errors.Draining, "UNAVAILABLE"),
        (errors.Starting, "UNAVAILABLE"),
        (errors.QueueTimeout, "DEADLINE_EXCEEDED"),
        (errors.RunTimeout, "DEADLINE_EXCEEDED"),
        (errors.TokenInvalid, "UNAUTHENTICATED"),
        (errors.ScopeMissing, "PERMISSION_DENIED"),
    ],
)
def test_the_table_of_services_md(kind, code):
    assert status.code_of(kind) is grpc.StatusCode[code]


@pytest.mark.parametrize("kind", leaves(), ids=lambda k: k.__name__)
def test_details_follow_the_class(kind):
    error = kind("expected 1, got 2", field="sampling.top_p", retry_after_s=2.5, details={"expected": "1"})
    wire = status.to_status(error)
    kinds = {d.type_url.rpartition(".")[2] for d in wire.details}
    assert ("RetryInfo" in kinds) == kind.retryable
    info = error_details_pb2.ErrorInfo()
    assert wire.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == (kind.reason, "quire", {"expected": "1"})
    back = status.from_message(status.to_message(error))
    assert type(back) is kind
    assert back.details == {"expected": "1"}


def test_messages_that_are_no_utf8_or_too_long_are_clipped():
    """BR-161: error text must never fail to serialise."""
    wire = status.to_status(errors.FieldOutOfRange("bad \udcff name" + "x" * 10_000, field="a\udcff"))
    assert wire.SerializeToString()
    assert len(wire.message) <= 2000
