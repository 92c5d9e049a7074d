"""Characters come whole, spaces come once, strange ids fail their own sequence."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime_service.streaming.detokenize import IncrementalDetokenizer
from runtime_service.streaming.vocabulary import Vocabulary
from shared.errors import InternalError, UnsupportedModel
from tests.support.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, metaspace_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
FALLBACK = byte_fallback_tokenizer()
GEMMA_LIKE = byte_fallback_tokenizer(strips_first_space=False)
LLAMA_2_THEN_3 = decoders.Sequence(
    [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel(add_prefix_space=False)]
)
"""Of a Llama 3 type tokenizer in a GGUF file, as transformers reads it."""
GGUF = byte_level_tokenizer()
GGUF.decoder = LLAMA_2_THEN_3
FAMILIES = {"byte level": BYTE_LEVEL, "byte fallback": FALLBACK, "gemma": GEMMA_LIKE, "llama 3 in gguf": GGUF}


def byte_ids(tokenizer, text):
    """One token a byte of `text`."""
    if tokenizer in (BYTE_LEVEL, GGUF):
        spelled = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
        return [tokenizer.token_to_id(character) for word, _ in spelled for character in word]
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


def deltas(tokenizer, ids):
    detokenizer = IncrementalDetokenizer(Vocabulary(tokenizer))
    return [detokenizer.push(token_id) for token_id in ids], detokenizer.flush()


@pytest.mark.parametrize("family", FAMILIES)
def test_characters_come_whole(family):
    """BR-092."""
    tokenizer = FAMILIES[family]
    ids = byte_ids(tokenizer, "😀ę")
    assert deltas(tokenizer, ids) == (["", "", "", "😀", "", "ę"], "")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_truncated_character_is_one_mark_at_the_end(family):
    """BR-092."""
    tokenizer = FAMILIES[family]
    assert deltas(tokenizer, byte_ids(tokenizer, "😀")[:3]) == (["", "", ""], "�")


@pytest.mark.parametrize(("family", "first"), [("byte level", " "), ("byte fallback", ""), ("gemma", " ")])
def test_spaces_are_kept_and_the_first_goes_where_the_decoder_drops_it(family, first):
    """BR-098: a space, space-fox, space-fox."""
    tokenizer = FAMILIES[family]
    space = tokenizer.token_to_id("▁") if family != "byte level" else tokenizer.token_to_id("Ġ")
    fox = [tokenizer.token_to_id(letter) for letter in "fox"]
    ids = [space, space, *fox, space, *fox]
    shown, rest = deltas(tokenizer, ids)
    assert shown[0] == first
    assert "".join(shown) + rest == tokenizer.decode(ids) == f"{first} fox fox"


@pytest.mark.parametrize(("family", "text"), [("byte fallback", "f"), ("gemma", " f")])
def test_a_space_spelled_as_a_byte_is_a_space(family, text):
    tokenizer = FAMILIES[family]
    ids = [tokenizer.token_to_id("<0x20>"), tokenizer.token_to_id("f")]
    assert "".join(deltas(tokenizer, ids)[0]) == tokenizer.decode(ids) == text


def test_metaspace_drops_the_first_space_only():
    tokenizer = metaspace_tokenizer()
    fox = tokenizer.token_to_id("▁fox")
    assert deltas(tokenizer, [fox, fox]) == (["fox", " fox"], "")


def test_special_tokens_have_no_text_and_do_not_start_it():
    ids = [0, FALLBACK.token_to_id("▁"), 1, FALLBACK.token_to_id("f")]
    assert deltas(FALLBACK, ids) == (["", "", "", "f"], "")


def test_added_tokens_that_are_not_special_have_text():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<think> 漢", special=False), AddedToken("plain", special=False)])
    ids = [tokenizer.token_to_id("<think> 漢"), tokenizer.token_to_id("plain")]
    assert deltas(tokenizer, ids) == (["<think> 漢", "plain"], "")


def test_a_vocabulary_without_decoder_puts_spaces_between_tokens():
    tokenizer = Tokenizer(models.WordLevel({"<u>": 0, "a": 1, "b": 3}, unk_token="<u>"))
    assert Vocabulary(tokenizer).size == 4
    assert deltas(tokenizer, [1, 2, 3]) == (["a", "", " b"], ""), "2 is a hole"


@pytest.mark.parametrize("token_id", [-1, 476, 2**32])
def test_ids_outside_the_vocabulary_are_internal_errors(token_id):
    """BR-100: a typed error for the caller to attribute; the vocabulary serves its other sequences on."""
    vocabulary = Vocabulary(FALLBACK)
    assert vocabulary.size == 476
    with pytest.raises(InternalError, match=f"0 to 475; the model gave {token_id}"):
        IncrementalDetokenizer(vocabulary).push(token_id)
    assert IncrementalDetokenizer(vocabulary).push(FALLBACK.token_to_id("f")) == "f"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("fo", " "), decoders.ByteLevel()]),
    ],
    ids=lambda decoder: type(decoder).__name__,
)
def test_decoders_that_take_back_text_are_refused(decoder):
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoder
    with pytest.raises(UnsupportedModel, match="must be ByteLevel, or made of"):
        Vocabulary(tokenizer)


def test_a_tokenizer_without_text_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>"])
    with pytest.raises(UnsupportedModel, match="visible text"):
        Vocabulary(tokenizer)
