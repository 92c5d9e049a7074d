"""A step that has been launched and whose tokens the host has not seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from runtime_service.core.sampled import SampledToken
from runtime_service.core.sequence import Sequence
from runtime_service.device_sampling import DrawnTokens, draw_tokens
from runtime_service.engine.engine import EngineInputs
from runtime_service.sampling import sample
from runtime_service.session.generation import Sample
from runtime_service.session.inputs import take_ids
from shared.errors import InternalError


@dataclass(slots=True, eq=False)
class Flight:
    """`samples` get one token each, from the rows of `logits`: drawn on the device already, or by the host when it lands."""

    samples: list[Sample]
    logits: torch.Tensor
    drawn: DrawnTokens | None

    @classmethod
    def take_off(cls, samples: list[Sample], logits: torch.Tensor, *, ahead: bool) -> Flight:
        """`logits` has a row for each sample. `ahead`: draw now, where the logits are; every sample then expects its token."""
        if not ahead or not samples:
            return cls(samples, logits, None)
        drawn = draw_tokens(logits, [sample.sampler for sample in samples])
        for chosen in samples:
            if chosen.sequence.may_go_on:
                chosen.sequence.expect()
        return cls(samples, logits, drawn)

    def give_ids(self, inputs: EngineInputs, sequences: Iterable[Sequence]) -> EngineInputs:
        """The next step's inputs, with the tokens that its `sequences`, row by row, expect from this one."""
        rows = {chosen.sequence: row for row, chosen in enumerate(self.samples)}
        unseen = {row: rows[sequence] for row, sequence in enumerate(sequences) if sequence.unseen}
        if not unseen:
            return inputs
        assert self.drawn is not None
        return take_ids(inputs, unseen, self.drawn.ids)

    def land(self) -> list[SampledToken | InternalError]:
        """The tokens. Waits for the device where they were drawn there."""
        states = [chosen.sampler for chosen in self.samples]
        if self.drawn is None:
            return sample(self.logits, states)
        tokens = self.drawn.wait()
        for state, token in zip(states, tokens, strict=True):
            if isinstance(token, SampledToken):
                state.record(token.token_id)
        return tokens
