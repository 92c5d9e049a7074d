"""What a caller may ask of one request: how tokens are sampled, where the text stops, how its KV entries are compacted.

Values are checked when the object is made, so a params object that exists is within every cap below. Errors name the field by
its path in a GenerateRequest.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shared.errors import FieldOutOfRange
from shared.kernels.compaction.modes import Mode

MAX_TEMPERATURE = 10.0
GREEDY_TEMPERATURE = 1e-5
"""At or below it sampling is greedy: the differences it would still tell apart are smaller than float32 logits resolve."""
MAX_TOP_K = 2**31 - 1
MAX_REPETITION_PENALTY = 10.0
MAX_ABS_PENALTY = 2.0
"""Bound of the presence and frequency penalties on either side of zero."""
MAX_SEED = 2**64 - 1
MAX_SAMPLES = 16
MAX_LOGPROBS = 20
MAX_TOKENS = 1_000_000
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 4096
"""Bound of all stop strings of a request together, in UTF-8."""
MAX_STOP_TOKEN_IDS = 64
MAX_TOKEN_ID = 2**31 - 1
MAX_COMPACTION_BUDGET = 1_000_000
MAX_COMPACTION_INTERVAL = 1_000_000


def _refuse(field: str, expected: str, got: object) -> FieldOutOfRange:
    shown = repr(got)[:64]
    return FieldOutOfRange(f"{field} must be {expected}; got {shown}", field=field, details={"expected": expected, "got": shown})


def _check_between(field: str, value: float, low: float, high: float) -> None:
    """FieldOutOfRange unless low <= value <= high. The comparison is written so that NaN fails it."""
    if not low <= value <= high:
        raise _refuse(field, f"{low} to {high}", value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    `temperature` 0 (or up to GREEDY_TEMPERATURE) means greedy. `top_p` 1, `top_k` 0 and `min_p` 0 are off; a `top_k` over the
    vocabulary keeps all of it.
    `repetition_penalty` 1 is off and counts the prompt; `presence_penalty` and `frequency_penalty` count generated tokens only.
    `seed` None draws a fresh one. `n` samples are generated from one prompt. `logprobs` None returns none, 0 the sampled
    token's own, k the k likeliest as well.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_between("sampling.temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if not 0.0 < self.top_p <= 1.0:
            raise _refuse("sampling.top_p", "above 0 and at most 1", self.top_p)
        _check_between("sampling.top_k", self.top_k, 0, MAX_TOP_K)
        if not 0.0 <= self.min_p < 1.0:
            raise _refuse("sampling.min_p", "at least 0 and below 1", self.min_p)
        if not 0.0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise _refuse("sampling.repetition_penalty", f"above 0 and at most {MAX_REPETITION_PENALTY}", self.repetition_penalty)
        _check_between("sampling.presence_penalty", self.presence_penalty, -MAX_ABS_PENALTY, MAX_ABS_PENALTY)
        _check_between("sampling.frequency_penalty", self.frequency_penalty, -MAX_ABS_PENALTY, MAX_ABS_PENALTY)
        if self.seed is not None:
            _check_between("sampling.seed", self.seed, 0, MAX_SEED)
        _check_between("sampling.n", self.n, 1, MAX_SAMPLES)
        if self.logprobs is not None:
            _check_between("sampling.logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class StopParams:
    """Where generation ends. Neither stop strings, stop ids nor the end-of-text token end it before `min_tokens` tokens.

    `ignore_eos` lets generation run through the model's end-of-text tokens; `stop` and `stop_token_ids` still apply.
    """

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_between("stopping.max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _check_between("stopping.min_tokens", self.min_tokens, 0, self.max_tokens)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _refuse("stopping.stop", f"at most {MAX_STOP_STRINGS} strings", len(self.stop))
        if any(not text for text in self.stop):
            raise _refuse("stopping.stop", "without empty strings", "")
        try:
            size = sum(len(text.encode()) for text in self.stop)
        except UnicodeEncodeError as error:
            raise _refuse("stopping.stop", "text that UTF-8 can hold (no lone surrogates)", error.object) from error
        if size > MAX_STOP_BYTES:
            raise _refuse("stopping.stop", f"at most {MAX_STOP_BYTES} bytes of UTF-8 together", size)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _refuse("stopping.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids", len(self.stop_token_ids))
        for token_id in self.stop_token_ids:
            _check_between("stopping.stop_token_ids", token_id, 0, MAX_TOKEN_ID)

    def end_ids(self, eos_ids: Collection[int]) -> frozenset[int]:
        """Tokens that end generation, given the model's end-of-text tokens."""
        return frozenset(self.stop_token_ids) if self.ignore_eos else frozenset(self.stop_token_ids).union(eos_ids)

    def check_vocabulary(self, vocab_size: int) -> None:
        """FieldOutOfRange if a stop id is none of `vocab_size` ids."""
        for token_id in self.stop_token_ids:
            _check_between("stopping.stop_token_ids", token_id, 0, vocab_size - 1)


@dataclass(frozen=True, slots=True)
class CompactionParams:
    """Rounds keep `budget` entries of a sequence that has grown to `budget + interval`; its first `sinks` are among them.

    `mode` is how survivors close the gaps: in order, or with fewer moves by filling holes, where nothing looks at the order.
    """

    policy: str
    budget: int
    interval: int
    sinks: int = 4
    mode: Mode = Mode.ORDERED

    def __post_init__(self) -> None:
        if not self.policy:
            raise _refuse("kv.policy.name", "the name of a policy", self.policy)
        _check_between("kv.policy.budget", self.budget, 1, MAX_COMPACTION_BUDGET)
        _check_between("kv.policy.interval", self.interval, 1, MAX_COMPACTION_INTERVAL)
        if not 0 <= self.sinks < self.budget:
            raise _refuse("kv.policy.sinks", f"0 to {self.budget - 1} (below the budget; 4 where none are given)", self.sinks)

    def check_policy(self, known: Collection[str]) -> None:
        """FieldOutOfRange if `policy` is not one of `known`."""
        if self.policy not in known:
            raise _refuse("kv.policy.name", f"one of {', '.join(sorted(known))}", self.policy)
