"""Small real tokenizers of both families, built in a fraction of a second.

Both know `<s>` (id 0) and `</s>` (id 1) as special tokens and put one `<s>` before a text.
"""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<s>", "</s>"
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. Berlin and Paris are cities.",
    "Ein Satz mit Umlauten: für, größer, Übermut. Emoji 😀 and 漢字 too.",
    "for i in range(10):\n    print(i)  # a comment\n\nstop here, then stop there",
] * 4


def byte_level_tokenizer(vocab_size: int = 400) -> Tokenizer:
    """The family of GPT-2, Llama 3 and SmolLM2: every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return _with_start(tokenizer)


def byte_fallback_tokenizer(*, strips_first_space: bool = True) -> Tokenizer:
    """The family of Llama 2 (`strips_first_space`) and Gemma: text pieces, and `<0x00>` .. `<0xFF>` for what they lack."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    trained.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    plain = [piece for piece in model["vocab"] if piece not in "😀漢字"]  # these come as bytes
    names = [BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *plain]
    merges = [(left, right) for left, right in model["merges"] if {left, right, left + right} <= set(plain)]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False, prepend_scheme="first" if strips_first_space else "never")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_first_space else steps)
    tokenizer.add_special_tokens([BOS, EOS])
    return _with_start(tokenizer)


def metaspace_tokenizer() -> Tokenizer:
    """Text pieces and the Metaspace decoder, as T5 has it; no byte tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=[BOS, EOS], show_progress=False))
    return _with_start(tokenizer)


def _with_start(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer
