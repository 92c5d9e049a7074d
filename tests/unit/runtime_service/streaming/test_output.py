"""Reasons and last texts, one rule for every way to end."""

from __future__ import annotations

import pytest

from runtime_service.core.params import StopParams
from runtime_service.core.sampled import SampledToken
from runtime_service.streaming.events import Finished, FinishReason, TokenDelta
from runtime_service.streaming.output import OutputAssembler
from runtime_service.streaming.vocabulary import Vocabulary
from shared.errors import InternalError
from tests.support.tokenizers import byte_fallback_tokenizer

TOKENIZER = byte_fallback_tokenizer(strips_first_space=False)
VOCABULARY = Vocabulary(TOKENIZER)
EOS = TOKENIZER.token_to_id("</s>")


def ids(text):
    return [TOKENIZER.token_to_id(character) for character in text]


def assembler(index=0, **stopping):
    return OutputAssembler(index, VOCABULARY, StopParams(**({"max_tokens": 100} | stopping)), [EOS])


def feed(one, token_ids):
    """(text of all deltas, the finish, tokens taken) after feeding until the end."""
    text, taken = "", 0
    for token_id in token_ids:
        output = one.push(SampledToken(token_id))
        taken += 1
        assert output.delta is not None
        assert [token.token_id for token in output.delta.tokens] == [token_id], "ids never lag"
        text += output.delta.text
        if output.finish:
            return text, output.finish, taken
    return text, None, taken


def test_tokens_come_as_deltas_with_their_sample():
    token = SampledToken(ids("f")[0], -0.5)
    assert assembler(index=2).push(token).delta == TokenDelta(2, (token,), "f")


def test_end_of_text_is_stop_without_a_match():
    assert feed(assembler(), [*ids("fo"), EOS, *ids("x")]) == ("fo", Finished(0, FinishReason.STOP), 3)


def test_a_stop_id_is_stop_with_its_id_and_without_its_text():
    (stop_id,) = ids("x")
    assert feed(assembler(stop_token_ids=(stop_id,)), ids("fox")) == ("fo", Finished(0, FinishReason.STOP, stop_id), 3)


def test_ignored_end_of_text_goes_on():
    assert feed(assembler(ignore_eos=True, max_tokens=4), [*ids("fo"), EOS, *ids("x")])[1:] == (Finished(0, FinishReason.LENGTH), 4)


def test_an_ignored_end_of_text_may_be_a_stop_id():
    assert feed(assembler(ignore_eos=True, stop_token_ids=(EOS,)), [EOS])[1] == Finished(0, FinishReason.STOP, EOS)


def test_a_stop_string_ends_the_text_before_it():
    """BR-095, BR-097: tokens stop at the same point as text, as there is one path."""
    assert feed(assembler(stop=("ox",)), ids("foxes")) == ("f", Finished(0, FinishReason.STOP, "ox"), 3)


def test_length_shows_the_text_of_the_last_token():
    assert feed(assembler(max_tokens=2, stop=("zz",)), ids("fox")) == ("fo", Finished(0, FinishReason.LENGTH), 2)


def test_length_in_the_middle_of_a_stop_string():
    """BR-111."""
    assert feed(assembler(stop=("fox",), max_tokens=2), ids("fox")) == ("fo", Finished(0, FinishReason.LENGTH), 2)


def test_length_in_the_middle_of_a_character():
    """BR-111."""
    half = [TOKENIZER.token_to_id("<0xF0>"), TOKENIZER.token_to_id("<0x9F>")]
    assert feed(assembler(max_tokens=3), [*ids("f"), *half]) == ("f�", Finished(0, FinishReason.LENGTH), 3)


def test_end_of_text_exactly_at_max_tokens():
    """BR-111."""
    assert feed(assembler(max_tokens=3), [*ids("fo"), EOS]) == ("fo", Finished(0, FinishReason.STOP), 3)


def test_a_stop_string_exactly_at_max_tokens():
    assert feed(assembler(stop=("ox",), max_tokens=3), ids("fox")) == ("f", Finished(0, FinishReason.STOP, "ox"), 3)


def test_a_match_in_doubt_counts_when_the_text_ends():
    """`o` is complete while `foxes` could still begin before it; then the text ends, in three ways."""
    stops = {"stop": ("o", "foxes")}
    stopped = Finished(0, FinishReason.STOP, "o")
    assert feed(assembler(**stops, max_tokens=3), ids("fox")) == ("f", stopped, 3)
    assert feed(assembler(**stops), [*ids("fox"), EOS]) == ("f", stopped, 4)
    one = assembler(**stops)
    feed(one, ids("fox"))
    output = one.cancel()
    assert (output.delta, output.finish) == (TokenDelta(0, (), "f"), Finished(0, FinishReason.CANCELLED))


def test_the_end_may_complete_a_stop_string():
    """The mark of an incomplete character is text like any other."""
    half = TOKENIZER.token_to_id("<0xF0>")
    assert feed(assembler(stop=("x�",), max_tokens=3), [*ids("fx"), half]) == ("f", Finished(0, FinishReason.STOP, "x�"), 3)


def test_an_end_from_outside_shows_what_was_withheld():
    one = assembler(stop=("foxes",))
    feed(one, ids("fox"))
    output = one.cancel()
    assert (output.delta, output.finish) == (TokenDelta(0, (), "fox"), Finished(0, FinishReason.CANCELLED))


def test_an_end_with_nothing_left_has_no_delta():
    one = assembler()
    feed(one, ids("fox"))
    assert one.cancel().delta is None


def test_nothing_ends_before_min_tokens():
    (stop_id,) = ids("x")
    early = [EOS, stop_id, EOS]
    assert feed(assembler(min_tokens=3, stop_token_ids=(stop_id,)), [*early, *ids("fo"), stop_id]) == (
        "xfo",
        Finished(0, FinishReason.STOP, stop_id),
        6,
    )
    assert feed(assembler(min_tokens=3), [*early, EOS])[1:] == (Finished(0, FinishReason.STOP), 4)


def test_stop_strings_are_sought_from_min_tokens_on():
    """Token 3 is the first whose text is searched: the `ox` of tokens 2 and 3 straddles the bound and stays."""
    assert feed(assembler(min_tokens=3, stop=("ox",)), ids("foxox")) == ("fox", Finished(0, FinishReason.STOP, "ox"), 5)
    assert feed(assembler(min_tokens=2, stop=("ox",)), ids("foxox")) == ("f", Finished(0, FinishReason.STOP, "ox"), 3)


def test_strange_ids_fail_this_sample_alone():
    """BR-100."""
    first, second = assembler(index=0), assembler(index=1)
    for token_id in (-1, 2**32):
        with pytest.raises(InternalError):
            first.push(SampledToken(token_id))
    assert feed(second, ids("fox"))[0] == "fox"
