"""The independent oracle: eager `transformers` on the same weights, its cache pruned by hand where a round would prune.

Nothing of Quire is imported. `kept` is written out again from the description of the policy, not taken from its code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast

from tests.support.hf_cache import cache_name

CHUNK = 128
"""Tokens of the engine's prefill profile."""


@dataclass(frozen=True)
class Rounds:
    """When and how a sink_recent round prunes: at budget + interval entries, down to the first `sinks` and the newest rest."""

    budget: int
    interval: int
    sinks: int = 4

    @property
    def limit(self) -> int:
        return self.budget + self.interval

    def kept(self, length: int) -> list[int]:
        recent = self.budget - self.sinks
        return [*range(self.sinks), *range(length - recent, length)]


@dataclass
class Result:
    """Shared between tests: not to be changed."""

    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    evicted: int = 0


def load_model(directory: Path, **options):
    """The component's weights in transformers' own model, float32."""
    config = AutoConfig.from_pretrained(directory)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    missing, unexpected = model.load_state_dict(load_file(directory / "weights.safetensors"), strict=False)
    assert not unexpected
    assert set(missing) <= set(model.all_tied_weights_keys), missing
    model.tie_weights()
    return model.eval()


@cache
def oracle_of(directory: Path) -> Oracle:
    """One a model, so that the tests of both layouts wait for its slow answers once."""
    return Oracle(directory)


@dataclass
class Oracle:
    """A model component directory (config.json, weights.safetensors, tokenizer.json) run by transformers on the CPU in float32."""

    directory: Path
    known: dict[tuple[Any, ...], Result] = field(default_factory=dict)

    @cached_property
    def model(self):
        return load_model(self.directory, attn_implementation="eager")

    @cached_property
    def tokenizer(self):
        return PreTrainedTokenizerFast(tokenizer_file=str(self.directory / "tokenizer.json"))

    def greedy(self, prompt: list[int], max_tokens: int, rounds: Rounds | None = None) -> Result:
        """Greedy tokens. With `rounds`, the prompt goes in by chunks that never pass the limit, as the runtime promises."""
        asked = (tuple(prompt), max_tokens, rounds)
        if asked not in self.known:
            self.known[asked] = self._greedy(prompt, max_tokens, rounds)
        return self.known[asked]

    @torch.inference_mode()
    def _greedy(self, prompt: list[int], max_tokens: int, rounds: Rounds | None) -> Result:
        cache, result, position = DynamicCache(config=self.model.config), Result(), 0
        pending, cached = list(prompt), {cache_name(self.model.forward): cache}
        while True:
            held = cache.get_seq_length()
            size = min(len(pending), CHUNK, rounds.limit - held) if rounds else len(pending)
            ids, pending = pending[:size], pending[size:]
            positions = torch.arange(position, position + size)[None]
            out = self.model(input_ids=torch.tensor([ids]), position_ids=positions, **cached, use_cache=True)
            position += size
            if rounds and cache.get_seq_length() >= rounds.limit:
                self._prune(cache, rounds, result)
            if pending:
                continue
            token = int(out.logits[0, -1].argmax())
            result.tokens.append(token)
            if len(result.tokens) == max_tokens:
                return result
            pending = [token]

    @staticmethod
    def _prune(cache: DynamicCache, rounds: Rounds, result: Result) -> None:
        length = cache.get_seq_length()
        kept = torch.tensor(rounds.kept(length))
        for layer in cache.layers:
            layer.keys = layer.keys[:, :, kept].contiguous()
            layer.values = layer.values[:, :, kept].contiguous()
        result.rounds += 1
        result.evicted += length - len(kept)
