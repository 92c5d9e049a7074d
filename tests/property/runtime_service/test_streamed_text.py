"""Streamed text against slow readings of the whole: one decode of all ids, one search of all text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_service.streaming.detokenize import IncrementalDetokenizer
from runtime_service.streaming.stop import StopMatcher
from runtime_service.streaming.vocabulary import Vocabulary
from tests.support import tokenizers as built

BYTE_LEVEL = built.byte_level_tokenizer()
FALLBACK = {
    "strips": built.byte_fallback_tokenizer(strips_first_space=True),
    "keeps": built.byte_fallback_tokenizer(strips_first_space=False),
}
METASPACE = built.metaspace_tokenizer()


def streamed(tokenizer, ids):
    detokenizer = IncrementalDetokenizer(Vocabulary(tokenizer))
    deltas = [detokenizer.push(token_id) for token_id in ids]
    return deltas, detokenizer.flush()


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=30))
def test_byte_level_deltas_join_to_one_decode_for_any_ids(ids):
    """BR-098. Invalid bytes included: whatever was shown stays."""
    deltas, rest = streamed(BYTE_LEVEL, ids)
    assert "".join(deltas) + rest == BYTE_LEVEL.decode(ids)
    assert rest in ("", "�")


@given(st.lists(st.integers(0, METASPACE.get_vocab_size() - 1), max_size=30))
def test_metaspace_deltas_join_to_one_decode_for_any_ids(ids):
    """BR-098."""
    deltas, rest = streamed(METASPACE, ids)
    assert "".join(deltas) + rest == METASPACE.decode(ids)


@pytest.mark.parametrize("name", FALLBACK)
@given(data=st.data())
def test_byte_fallback_deltas_join_to_one_decode_for_valid_runs(name, data):
    """BR-098. Pieces are any tokens, byte tokens come as the whole characters they spell."""
    tokenizer = FALLBACK[name]
    vocab = tokenizer.get_vocab()
    pieces = [[index] for token, index in sorted(vocab.items()) if not token.startswith("<0x")]
    characters = st.text(st.characters(codec="utf-8"), min_size=1, max_size=3).map(
        lambda text: [vocab[f"<0x{byte:02X}>"] for byte in text.encode()]
    )
    ids = [i for group in data.draw(st.lists(st.one_of(st.sampled_from(pieces), characters), max_size=20)) for i in group]
    deltas, rest = streamed(tokenizer, ids)
    assert "".join(deltas) + rest == tokenizer.decode(ids)
    assert rest == ""


@given(st.lists(st.binary(min_size=1, max_size=6), max_size=6))
def test_broken_byte_runs_read_as_utf8_with_replacement(runs):
    """Runs of byte tokens that are no UTF-8 read as the bytes do, and a following piece is not swallowed."""
    tokenizer = FALLBACK["keeps"]
    vocab = tokenizer.get_vocab()
    ids, text = [], b""
    for run in runs:
        ids += [*(vocab[f"<0x{byte:02X}>"] for byte in run), vocab["▁"]]
        text += run + b" "
    deltas, rest = streamed(tokenizer, ids)
    assert "".join(deltas) + rest == text.decode("utf-8", "replace")


@given(st.text(max_size=60), st.sampled_from(["byte level", *FALLBACK]))
def test_text_survives_encoding_and_streaming(text, name):
    tokenizer = BYTE_LEVEL if name == "byte level" else FALLBACK[name]
    encoded = tokenizer.encode(text.replace("\x00", ""))
    deltas, rest = streamed(tokenizer, encoded.ids)
    assert "".join(deltas) + rest == tokenizer.decode(encoded.ids)


def search(text, stops):
    """The definition: earliest start, then shortest."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


SMALL = st.text("ab", min_size=1, max_size=5)


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(SMALL, max_size=4))
def test_matching_pieces_equals_searching_the_whole(pieces, stops):
    """BR-094, BR-095: two letters make overlaps, borders and nested stops likely."""
    matcher, shown, match = StopMatcher(stops), "", None
    for piece in pieces:
        text, match = matcher.push(piece)
        shown += text
        if match is not None:
            break
    else:
        text, match = matcher.flush()
        shown += text
    expected, expected_match = search("".join(pieces), stops)
    assert (shown, match) == (expected, expected_match)


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(SMALL, min_size=1, max_size=4))
def test_what_is_withheld_may_still_become_a_stop_string(pieces, stops):
    """Nothing is held back without cause."""
    matcher, read, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        text, match = matcher.push(piece)
        read, shown = read + piece, shown + text
        if match is not None:
            return
        withheld = read[len(shown) :]
        assert withheld == "" or any(stop.startswith(withheld) and stop != withheld for stop in stops)
