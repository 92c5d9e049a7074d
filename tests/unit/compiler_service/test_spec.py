"""A spec is one value, one text and one digest, and no bad field gets into it."""

import dataclasses
import json

import pytest

from compiler_service.spec import CompileSpec, decode_spec, encode_spec, profile_set
from shared.errors import FieldOutOfRange
from shared.kv_spec import Layout

SPEC = CompileSpec(
    source="/models/m",
    backend="inductor",
    layout=Layout.PAGED,
    dtype="float32",
    max_len=512,
    page_size=16,
    profiles=profile_set(("decode=8x1", "prefill=1x128")),
    targets=("cpu",),
    allow_copying=False,
    constant_weights=False,
)
CHANGES = {
    "source": "/models/n",
    "layout": Layout.LINEAR,
    "dtype": "bfloat16",
    "max_len": 1024,
    "page_size": 32,
    "profiles": profile_set(("decode=4x1", "prefill=1x128")),
}


def changed(**fields):
    if fields.get("layout") is Layout.LINEAR:
        fields["page_size"] = SPEC.max_len
    return dataclasses.replace(SPEC, **fields)


def test_the_text_gives_the_value_back():
    linear = changed(layout=Layout.LINEAR)
    assert decode_spec(encode_spec(SPEC)) == SPEC
    assert decode_spec(encode_spec(linear)) == linear


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_changes_the_digest(field):
    """BR-140: a key that ignores an option serves the wrong build."""
    assert changed(**{field: CHANGES[field]}).digest != SPEC.digest
    assert changed().digest == SPEC.digest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", ""),
        ("source", "x" * 5000),
        ("source", "a\nb"),
        ("backend", "eager"),
        ("dtype", "float64"),
        ("dtype", "int8"),
        ("max_len", 0),
        ("max_len", (1 << 20) + 1),
        ("max_len", 127),  # shorter than the prefill profile
        ("page_size", 0),
        ("page_size", 257),
        ("targets", ()),
        ("targets", ("gpu",)),
        ("targets", ("cpu", "sm90")),
        ("allow_copying", True),
        ("constant_weights", True),
    ],
)
def test_a_bad_field_is_refused_by_name(field, value):
    with pytest.raises(FieldOutOfRange) as refused:
        dataclasses.replace(SPEC, **{field: value})
    assert refused.value.field == {"max_len": "profiles"}.get(field if value == 127 else "", field)


TENSORRT = dataclasses.replace(
    SPEC, backend="tensorrt_rtx", layout=Layout.LINEAR, page_size=SPEC.max_len, targets=("sm80", "sm120")
)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("targets", {"targets": ("cpu",)}),
        ("targets", {"targets": ("sm80", "cpu")}),
        ("allow_copying", {"allow_copying": True, "layout": Layout.PAGED, "page_size": 16}),
    ],
)
def test_what_tensorrt_does_not_build_is_refused_by_name(field, changes):
    with pytest.raises(FieldOutOfRange) as refused:
        dataclasses.replace(TENSORRT, **changes)
    assert refused.value.field == field


def test_where_tensorrt_keeps_its_weights_is_part_of_the_spec():
    own = dataclasses.replace(TENSORRT, constant_weights=True)
    assert decode_spec(encode_spec(own)) == own
    assert own.digest != TENSORRT.digest


def test_a_linear_page_is_the_whole_row():
    with pytest.raises(FieldOutOfRange, match="512 for the linear layout; got '16'"):
        dataclasses.replace(SPEC, layout=Layout.LINEAR)


def test_too_many_profiles():
    many = ("decode=8x1", "prefill=1x128", *(f"extra{i}=1x{i}" for i in range(1, 8)))
    with pytest.raises(FieldOutOfRange, match="at most 8; got '9'"):
        changed(profiles=profile_set(many))


@pytest.mark.parametrize("profiles", [("decode=8x1",), ("decode=8x1", "decode=4x1", "prefill=1x8"), ("decode=0x1", "prefill=1x8")])
def test_profiles_without_a_phase_or_with_one_twice_are_refused(profiles):
    with pytest.raises(FieldOutOfRange) as refused:
        profile_set(profiles)
    assert refused.value.field == "profiles"


@pytest.mark.parametrize(
    "edit",
    [
        lambda f: f.pop("dtype"),
        lambda f: f.update(speed=9),
        lambda f: f.update(max_len="512"),
        lambda f: f.update(layout="ring"),
        lambda f: f.update(targets="cpu"),
        lambda f: f.update(max_len=-1),
    ],
    ids=["missing", "unknown", "text for number", "unknown layout", "text for list", "out of range"],
)
def test_a_text_that_is_no_spec_is_refused(edit):
    fields = json.loads(encode_spec(SPEC))
    edit(fields)
    with pytest.raises(FieldOutOfRange):
        decode_spec(json.dumps(fields).encode())
