"""Stop strings by example; the property tests compare with a search of the whole text."""

from __future__ import annotations

import pytest

from runtime_service.streaming.stop import StopMatcher


def fed(stops, pieces):
    matcher = StopMatcher(stops)
    results = [matcher.push(piece) for piece in pieces]
    return [text for text, _ in results], results[-1][1], matcher


def test_pieces_of_a_stop_string_are_withheld():
    """BR-094, case 1."""
    shown, match, _ = fed(["LMNOPQ"], ["JK", "LM", "N", "OP", "Q"])
    assert (shown, match) == (["JK", "", "", "", ""], "LMNOPQ")


def test_withheld_pieces_come_when_ruled_out():
    """BR-094, case 2."""
    shown, match, _ = fed(["LMNOPQ"], ["JK", "LM", "N", "OP", "R"])
    assert (shown, match) == (["JK", "", "", "", "LMNOPR"], None)


def test_withheld_pieces_come_at_the_end():
    """BR-094, case 3."""
    _, _, matcher = fed(["LMNOPQ"], ["JK", "LM", "N", "OP"])
    assert matcher.flush() == ("LMNOP", None)


def test_a_stop_string_may_end_within_a_piece():
    """BR-095: nothing after it is shown."""
    assert fed(["Berl"], ["in ", "Berlin"])[:2] == (["in ", ""], "Berl")


def test_a_stop_string_may_begin_within_a_piece():
    """BR-095."""
    assert fed(["n. E"], ["Berlin", ". ", "End"])[:2] == (["Berli", "", ""], "n. E")


@pytest.mark.parametrize("pieces", [["abcdx"], ["abc", "dx"], ["a", "b", "c", "d", "x"]])
def test_the_earliest_start_wins_however_the_text_is_cut(pieces):
    """BR-095: `c` is complete first, but `bcd` starts before it."""
    matcher, shown = StopMatcher(["c", "bcd"]), ""
    for piece in pieces:
        text, match = matcher.push(piece)
        shown += text
        if match:
            break
    assert (shown, match) == ("a", "bcd")


def test_a_later_match_stands_when_the_earlier_start_fails():
    shown, match, _ = fed(["c", "bcd"], ["ab", "c", "x"])
    assert (shown, match) == (["a", "", "b"], "c")


def test_a_later_match_stands_when_the_text_ends():
    _, match, matcher = fed(["c", "bcd"], ["abc"])
    assert match is None
    assert matcher.flush() == ("b", "c")


def test_of_two_that_start_together_the_shorter_is_enough():
    assert fed(["\n\n", "\n\nUser"], ["a\n", "\n"])[:2] == (["a", ""], "\n\n")


def test_the_shorter_stands_also_while_an_earlier_start_is_in_doubt():
    assert fed(["bc", "bcd", "abcdx"], ["abcd", "y"])[:2] == (["", "a"], "bc")


def test_a_failed_start_may_hide_another():
    """After `aab` fails at its third letter its second still counts."""
    assert fed(["aab"], ["a", "a", "a", "b"])[:2] == (["", "", "a", ""], "aab")


def test_without_stop_strings_text_passes():
    assert fed([], ["a", "b"])[:2] == (["a", "b"], None)
