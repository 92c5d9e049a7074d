"""Words of the command line and the messages they become."""

import pytest

from shared.cli.main import check_text, hoist_output
from shared.cli.options import byte_count, compile_spec, enum_value, kv_options, seconds, word_of
from shared.errors import FieldOutOfRange
from shared.pb.quire.v1 import common_pb2


def spec(**changes):
    given = {
        "source": "m",
        "backend": "inductor",
        "layout": "paged",
        "dtype": "float32",
        "max_len": 64,
        "page_size": 8,
        "profiles": (),
    }
    return compile_spec(**(given | changes))


def test_a_spec_has_ordered_profiles_and_defaults():
    assert [(p.name, p.batch.max, p.query_len.max) for p in spec().profiles] == [("decode", 8, 1), ("prefill", 1, 128)]
    given = spec(profiles=["prefill=2x32", "decode=4x1"]).profiles
    assert [(p.name, p.batch.min, p.batch.opt, p.batch.max) for p in given] == [("prefill", 1, 2, 2), ("decode", 1, 4, 4)]


def test_a_page_size_is_sent_for_the_paged_layout_only():
    assert spec().page_size == 8
    assert spec(layout="linear").page_size == 0


def test_a_path_that_exists_becomes_absolute_and_another_word_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert spec(source="here").source == str(tmp_path / "here")
    assert spec(source="s3://bucket/model").source == "s3://bucket/model"


@pytest.mark.parametrize(
    ("option", "value"),
    [("backend", "tpu"), ("layout", "ring"), ("dtype", "int4"), ("backend", "unspecified"), ("profiles", ["decode"])],
)
def test_an_unknown_word_is_refused_with_the_known_ones(option, value):
    with pytest.raises(FieldOutOfRange):
        spec(**{option: value})


@pytest.mark.parametrize("number", ["4294967296", "9" * 5000])
def test_a_number_no_message_holds_is_refused(number):
    with pytest.raises(FieldOutOfRange, match="up to 4294967295"):
        kv_options(f"policy=knorm,budget={number}")
    with pytest.raises(FieldOutOfRange, match="bytes"):
        byte_count("999999999TiB", "--max-bytes")


def test_a_command_line_that_is_no_text_is_refused():
    check_text(["generate", "--prompt", "\u2665"])
    with pytest.raises(FieldOutOfRange, match="valid UTF-8"):
        check_text(["generate", "--prompt", "\udcff"])


def test_enum_words_are_their_names_without_the_prefix():
    assert enum_value(common_pb2.KVLayout, "KV_LAYOUT", "linear", "--layout") == common_pb2.KV_LAYOUT_LINEAR
    assert word_of(common_pb2.KVLayout, "KV_LAYOUT", common_pb2.KV_LAYOUT_LINEAR) == "linear"
    with pytest.raises(FieldOutOfRange, match="linear, paged"):
        enum_value(common_pb2.KVLayout, "KV_LAYOUT", "ring", "--layout")


def test_compaction_words():
    assert kv_options(None).WhichOneof("compaction") is None
    assert kv_options("off").off
    policy = kv_options("policy=knorm,budget=256").policy
    assert (policy.name, policy.budget, policy.interval, policy.HasField("sinks")) == ("knorm", 256, 64, False)
    policy = kv_options("budget=9,sinks=0,interval=3,policy=sink_recent").policy
    assert (policy.budget, policy.interval, policy.sinks, policy.HasField("sinks")) == (9, 3, 0, True)
    assert policy.mode == common_pb2.COMPACTION_MODE_UNSPECIFIED
    policy = kv_options("policy=knorm,budget=9,mode=hole_filling").policy
    assert policy.mode == common_pb2.COMPACTION_MODE_HOLE_FILLING


@pytest.mark.parametrize(
    "text",
    [
        "",
        "on",
        "policy=",
        "policy=a",
        "budget=4",
        "policy=a,budget=x",
        "policy=a,budget=-1",
        "a=b",
        "policy=a,policy=b",
        "policy=a,budget=4,mode=b",
    ],
)
def test_bad_compaction_words_are_refused(text):
    with pytest.raises(FieldOutOfRange, match="--compaction"):
        kv_options(text)


@pytest.mark.parametrize(
    ("words", "hoisted"),
    [
        ([], []),
        (["jobs", "ls", "--output", "json"], ["--output", "json", "jobs", "ls"]),
        (["jobs", "--output=json", "ls"], ["--output=json", "jobs", "ls"]),
        (["generate", "--prompt", "x", "--", "--output"], ["generate", "--prompt", "x", "--", "--output"]),
    ],
)
def test_output_may_stand_anywhere(words, hoisted):
    assert hoist_output(words) == hoisted


@pytest.mark.parametrize(
    ("text", "value"), [("30d", 2_592_000), ("12h", 43_200), ("90m", 5400), ("10s", 10), ("0s", 0), ("1.5 h", 5400)]
)
def test_durations(text, value):
    assert seconds(text, "--max-age") == value


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("1000", 1000), ("500MB", 500_000_000), ("2GiB", 2 << 30), ("1.5KiB", 1536)])
def test_sizes(text, value):
    assert byte_count(text, "--max-bytes") == value


@pytest.mark.parametrize("text", ["", "d", "-1d", "1", "1w", "1D", "1e3s", "nan", "1" * 16 + "s"])
def test_what_is_no_duration_is_refused_by_option(text):
    with pytest.raises(FieldOutOfRange, match="such as 30d") as caught:
        seconds(text, "--max-age")
    assert caught.value.field == "--max-age"


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1gib", "1 G", "0x10"])
def test_what_is_no_size_is_refused_by_option(text):
    with pytest.raises(FieldOutOfRange, match="such as 20GiB"):
        byte_count(text, "--max-bytes")


def test_an_output_without_a_value_stays_where_it_was_for_the_parser_to_name():
    assert hoist_output(["jobs", "ls", "--output"]) == ["jobs", "ls", "--output"]
