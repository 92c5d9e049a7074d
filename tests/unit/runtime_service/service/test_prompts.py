"""Prompts: one start token, caps before work."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from runtime_service.service.prompts import PromptEncoder, PromptLimits
from shared.errors import FieldOutOfRange
from shared.pb.quire.v1.inference_pb2 import GenerateRequest, TokenIds
from tests.support.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

BOS, EOS = 0, 1


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1, thread_name_prefix="tokenise") as pool:
        yield pool


@pytest.fixture
def encode(executor):
    def run(request, tokenizer=None, max_bytes=1000, max_tokens=100):
        tokenizer = tokenizer or byte_level_tokenizer()
        encoder = PromptEncoder(tokenizer, PromptLimits(max_bytes, max_tokens), executor)
        return asyncio.run(encoder.encode(request))

    return run


def test_text_a_tokenizer_has_no_tokens_for_is_refused(encode):
    with pytest.raises(FieldOutOfRange, match="can encode") as error:
        encode(GenerateRequest(text="unheard"), Tokenizer(WordLevel({"word": 0}, unk_token="nothing")))
    assert error.value.field == "text"


def test_text_a_tokenizer_panics_over_is_refused(encode):
    """Its pattern backtracks until the regex library gives up, by a panic: no answer at all would be the caller's to wait for."""
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(FieldOutOfRange, match="retry-limit") as error:
        encode(GenerateRequest(text="a" * 40 + "b"), tokenizer)
    assert error.value.field == "text"


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), byte_fallback_tokenizer()], ids=["byte level", "byte fallback"])
def test_exactly_one_start_token(encode, tokenizer):
    """BR-102: the template wrote it, or did not."""
    plain = encode(GenerateRequest(text="a fox"), tokenizer)
    templated = encode(GenerateRequest(text="<s>a fox"), tokenizer)
    assert plain[0] == templated[0] == BOS
    assert plain.count(BOS) == templated.count(BOS) == 1
    assert tokenizer.decode(templated) == "a fox"


def test_a_tokenizer_without_start_token_gets_none(encode):
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = None
    assert BOS not in encode(GenerateRequest(text="a fox"), tokenizer)
    assert encode(GenerateRequest(text="<s>a"), tokenizer)[0] == BOS


def test_special_tokens_in_a_text_are_parsed(encode):
    assert EOS in encode(GenerateRequest(text="a</s>b"))


def test_ids_are_used_as_they_are(encode):
    assert encode(GenerateRequest(token_ids=TokenIds(ids=[5, 5, 7]))) == (5, 5, 7)


def test_texts_are_tokenised_on_the_executors_thread(executor):
    tokenizer = byte_level_tokenizer()
    encoder = PromptEncoder(tokenizer, PromptLimits(100, 100), executor)
    names = []

    class Spy:
        def encode_batch_fast(self, *args, **kwargs):
            names.append(threading.current_thread().name)
            return tokenizer.encode_batch_fast(*args, **kwargs)

    encoder._tokenizer = Spy()
    asyncio.run(encoder.encode(GenerateRequest(text="a")))
    assert names[0].startswith("tokenise")


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (GenerateRequest(), "prompt", "text or token_ids; got neither"),
        (GenerateRequest(token_ids=TokenIds(ids=[5] * 101)), "token_ids.ids", "at most 100 tokens; got 101"),
        (GenerateRequest(text="€" * 334), "text", "at most 1000 bytes; got 1002"),
        (GenerateRequest(text="~" * 100), "text", "at most 100 tokens; got 101"),
    ],
)
def test_bad_prompts_are_refused_by_name(encode, request_, field, message):
    with pytest.raises(FieldOutOfRange, match=message) as refusal:
        encode(request_)
    assert refusal.value.field == field


def test_caps_are_inclusive(encode):
    assert len(encode(GenerateRequest(token_ids=TokenIds(ids=[5] * 100)))) == 100
    assert len(encode(GenerateRequest(text="~" * 99))) == 100
    assert encode(GenerateRequest(text="€" * 3), max_bytes=9)


def test_oversize_texts_are_refused_before_tokenising(executor):
    """BR-162."""
    encoder = PromptEncoder(byte_level_tokenizer(), PromptLimits(10, 10), executor)
    encoder._tokenizer = None  # would fail if used
    with pytest.raises(FieldOutOfRange, match="at most 10 bytes"):
        asyncio.run(encoder.encode(GenerateRequest(text="x" * 11)))
