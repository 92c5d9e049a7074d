"""A small decoder that runs on real KV pools, and an oracle that has never heard of them.

`TinyEngine` implements the Engine protocol in plain torch with the semantics of `quire::paged_attend`. Arithmetic is float64 and
what goes into the pool is rounded to the pool's float32, in the engine and in the oracle alike, so a token does not depend on how
its sequence was batched, chunked or recomputed, and outputs are compared for equality.

`Oracle` computes the same model densely in numpy: for each layer a plain list of (position, key, value), no pages, no
ordinals, no batches. It is told which positions each round kept and answers with the tokens that must come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from runtime_service.engine.bindings import check_inputs
from runtime_service.engine.engine import EngineInputs
from runtime_service.kv.pool import KVPool
from shared.bindings import POSITION_IDS, BindingSpec, Role
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.manifest import SCHEMA_VERSION, EngineManifest, ModelFacts, Target
from shared.profiles import ProfileSet, parse_profile

VOCAB = 251  # prime, so that no modulus or stride agrees with it by accident
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP = 2, 4, 2, 8, 32, 64
EOS = 250
ROPE_BASE = 100.0
MAX_POSITION = 4096

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TinyModel:
    """Random weights, fixed by `seed`. `window` makes layer 1 a sliding-window layer."""

    seed: int = 0
    window: int | None = None

    @cached_property
    def weights(self) -> dict[str, Array]:
        rng = np.random.default_rng(self.seed)

        def matrix(rows: int, columns: int, gain: float = 1.0) -> Array:
            return rng.standard_normal((rows, columns)) * gain / np.sqrt(rows)

        weights = {"embed": rng.standard_normal((VOCAB, HIDDEN)), "head": matrix(HIDDEN, VOCAB)}
        for layer in range(LAYERS):
            # Sharp attention with a strong voice: what is in the cache decides the next token, not the last token alone.
            weights[f"{layer}.q"] = matrix(HIDDEN, HEADS * HEAD_DIM, gain=2.0)
            weights[f"{layer}.k"] = matrix(HIDDEN, KV_HEADS * HEAD_DIM)
            weights[f"{layer}.v"] = matrix(HIDDEN, KV_HEADS * HEAD_DIM, gain=3.0)
            weights[f"{layer}.o"] = matrix(HEADS * HEAD_DIM, HIDDEN)
            weights[f"{layer}.up"] = matrix(HIDDEN, MLP)
            weights[f"{layer}.down"] = matrix(MLP, HIDDEN)
        return weights

    def layer_window(self, layer: int) -> int | None:
        return self.window if layer == 1 else None

    def spec(self, layout: Layout, page_size: int, max_len: int) -> KVCacheSpec:
        geometry = {"kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": DType.FLOAT32}
        if self.window is None:
            groups: tuple[LayerGroup, ...] = (LayerGroup(layers=(0, 1), **geometry),)
        else:
            groups = (LayerGroup(layers=(0,), **geometry), LayerGroup(layers=(1,), window=self.window, **geometry))
        return KVCacheSpec(groups, layout, max_len if layout is Layout.LINEAR else page_size, max_len)


def tiny_tokenizer() -> Tokenizer:
    """Token i is the word `wi`; decoding joins words with spaces."""
    return Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))


def tiny_manifest(spec: KVCacheSpec, profiles: Iterable[str], eos_ids: Iterable[int]) -> EngineManifest:
    return EngineManifest(
        schema_version=SCHEMA_VERSION,
        artifact_id="0" * 64,
        kind="engine",
        model=ModelFacts(
            model_id="1" * 64,
            name="tiny",
            architecture="tiny",
            vocab_size=VOCAB,
            num_layers=LAYERS,
            num_heads=HEADS,
            max_position=MAX_POSITION,
            bos_token_id=None,
            eos_token_ids=tuple(eos_ids),
            weights_dtype="float64",
            weights_bytes=0,
        ),
        cache=spec,
        profiles=ProfileSet(tuple(parse_profile(text) for text in profiles)),
        bindings=(BindingSpec(POSITION_IDS, Role.INPUT, "int32", (None, None)),),
        aliases=(),
        backend="eager",
        target=Target("cpu", (), ()),
        toolchain={},
        constants={},
        proof=(),
        key_components={},
        files=(),
    )


class TinyEngine:
    """`on_run`, if set, is called with the inputs before each step: tests observe, delay or fail steps with it. `runs_ahead` makes
    the session treat it as one whose logits are still being computed when `run` returns."""

    def __init__(
        self,
        model: TinyModel | None = None,
        *,
        layout: Layout = Layout.PAGED,
        page_size: int = 4,
        max_len: int = 64,
        profiles: Iterable[str] = ("decode=8x1", "prefill=2x16"),
        eos_ids: Iterable[int] = (EOS,),
        runs_ahead: bool = False,
    ) -> None:
        self.runs_ahead = runs_ahead
        self.model = model or TinyModel()
        self.manifest = tiny_manifest(self.model.spec(layout, page_size, max_len), profiles, eos_ids)
        self.on_run: Callable[[EngineInputs], None] | None = None
        self.closed = False
        self._weights = {name: torch.from_numpy(value) for name, value in self.model.weights.items()}
        for layer in range(LAYERS):
            self._weights[f"{layer}.qkv"] = torch.cat([self._weights[f"{layer}.{part}"] for part in "qkv"], dim=1)
        self._rotation = _rotations()

    def run(self, inputs: EngineInputs, pool: KVPool) -> torch.Tensor:
        assert not self.closed
        check_inputs(inputs, self.manifest, pool.num_pages)
        if self.on_run is not None:
            self.on_run(inputs)
        w, rotation = self._weights, self._rotation[inputs.position_ids.long()][:, None]
        table_BM, start_B = inputs.block_table.long(), inputs.write_start.long()
        x_BnE = w["embed"][inputs.input_ids.long()]
        for layer in range(LAYERS):
            h_BnHD = (_norm(x_BnE) @ w[f"{layer}.qkv"]).unflatten(-1, (-1, HEAD_DIM))
            q_BHnD, k_BKnD, v_BKnD = h_BnHD.transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            q_BHnD, k_BKnD = _rotate(q_BHnD, rotation), _rotate(k_BKnD, rotation)
            out_BHnD = paged_attend(q_BHnD, k_BKnD, v_BKnD, pool.by_page(layer), table_BM, start_B, self.model.layer_window(layer))
            x_BnE = x_BnE + out_BHnD.transpose(1, 2).flatten(2) @ w[f"{layer}.o"]
            x_BnE = x_BnE + torch.relu(_norm(x_BnE) @ w[f"{layer}.up"]) @ w[f"{layer}.down"]
        last_BE = x_BnE[torch.arange(inputs.batch), inputs.last_index.long()]
        return (_norm(last_BE) @ w["head"]).float()

    def close(self) -> None:
        self.closed = True


def paged_attend(
    q_BHnD: torch.Tensor,
    k_BKnD: torch.Tensor,
    v_BKnD: torch.Tensor,
    pages: torch.Tensor,
    table_BM: torch.Tensor,
    start_B: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Write, then attend, as `quire::paged_attend` does, in float64. `pages` is a layer's pool `[pages, 2, K, page_size, D]`."""
    page_size, count, kv_heads = pages.shape[3], q_BHnD.shape[2], k_BKnD.shape[1]
    own_Bn = start_B[:, None] + torch.arange(count)
    page_Bn, offset_Bn = table_BM.gather(1, own_Bn // page_size), own_Bn % page_size
    pages[page_Bn, :, :, offset_Bn] = torch.stack([k_BKnD, v_BKnD], dim=1).permute(0, 3, 1, 2, 4).to(pages.dtype)

    cells = torch.arange(int(own_Bn.max()) + 1)
    visible_BnS = cells <= own_Bn[..., None]
    if window is not None:
        visible_BnS &= cells > own_Bn[..., None] - window
    cached_BS2KD = pages[table_BM[:, cells // page_size], :, :, cells % page_size]
    # A cell no query of its row sees may hold anything, NaN included: it is not read.
    cached_BS2KD = torch.where(visible_BnS.any(1)[..., None, None, None], cached_BS2KD, 0.0).double()
    k_BKSD, v_BKSD = cached_BS2KD.permute(2, 0, 3, 1, 4)
    q_BKGnD = q_BHnD.unflatten(1, (kv_heads, -1))
    scores_BKGnS = q_BKGnD @ k_BKSD[:, :, None].mT / HEAD_DIM**0.5
    weights_BKGnS = scores_BKGnS.masked_fill(~visible_BnS[:, None, None], -torch.inf).softmax(-1)
    return (weights_BKGnS @ v_BKSD[:, :, None]).flatten(1, 2)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def _rotations() -> torch.Tensor:
    """Cosines and sines of every position, `[position, 2, D / 2]`."""
    frequencies = ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = torch.arange(MAX_POSITION, dtype=torch.float64)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def _rotate(x_BHnD: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    cos, sin = rotation.unbind(-2)
    a, b = x_BHnD.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@dataclass(frozen=True)
class Round:
    """A round of one sequence: after `at` tokens were computed, layers without a window kept only `kept` positions.

    Where heads keep entries of their own: `heads[head]`, or `heads[layer * KV_HEADS + head]`, and `kept` means nothing.
    """

    at: int
    kept: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...] = ()

    def kept_by(self, layer: int, head: int) -> tuple[int, ...]:
        if not self.heads:
            return self.kept
        return self.heads[head if len(self.heads) == KV_HEADS else layer * KV_HEADS + head]


def sink_recent_rounds(total: int, budget: int, interval: int, sinks: int) -> list[Round]:
    """The rounds of a sequence that computes `total` tokens with policy sink_recent, from its definition.

    After the last one it has ended, and nothing is compacted.
    """
    rounds, held = [], []
    for position in range(total - 1):
        held.append(position)
        if len(held) == budget + interval:
            held = held[:sinks] + held[len(held) - (budget - sinks) :]
            rounds.append(Round(position + 1, tuple(held)))
    return rounds


class Oracle:
    """The tiny model computed token by token over dense lists."""

    def __init__(self, model: TinyModel | None = None) -> None:
        self._model = model or TinyModel()

    def expected_tokens(
        self,
        prompt: Sequence[int],
        count: int,
        rounds: Iterable[Round] = (),
        choose: Callable[[Array], int] = lambda logits: int(np.argmax(logits)),
    ) -> list[int]:
        """The `count` tokens that follow `prompt`; `choose` picks one from float32 logits (default: greedy, lowest id on ties)."""
        due = {round_.at: round_ for round_ in rounds}
        cache: list[list[dict[int, tuple[Array, Array]]]] = [[{} for _ in range(KV_HEADS)] for _ in range(LAYERS)]
        tokens = list(prompt)
        for position in range(len(prompt) + count - 1):
            logits = self._step(tokens[position], position, cache)
            if position + 1 in due:
                self._prune(cache, due[position + 1])
            if position + 1 == len(tokens):
                tokens.append(choose(logits))
        return tokens[len(prompt) :]

    def _prune(self, cache: list[list[dict[int, tuple[Array, Array]]]], round_: Round) -> None:
        for layer, heads in enumerate(cache):
            if self._model.layer_window(layer) is None:
                for head, entries in enumerate(heads):
                    kept = round_.kept_by(layer, head)
                    assert set(kept) <= set(entries), "a round kept what an earlier one had evicted"
                    heads[head] = {position: entries[position] for position in kept}

    def _step(self, token: int, position: int, cache: list[list[dict[int, tuple[Array, Array]]]]) -> Array:
        w = self._model.weights
        x = w["embed"][token]
        for layer in range(LAYERS):
            h = self._norm(x)
            q = self._rope((h @ w[f"{layer}.q"]).reshape(HEADS, HEAD_DIM), position)
            k = self._rope((h @ w[f"{layer}.k"]).reshape(KV_HEADS, HEAD_DIM), position)
            v = (h @ w[f"{layer}.v"]).reshape(KV_HEADS, HEAD_DIM)
            window = self._model.layer_window(layer)
            seen = []
            for head, entries in enumerate(cache[layer]):
                entries[position] = (k[head].astype(np.float32).astype(np.float64), v[head].astype(np.float32).astype(np.float64))
                inside = [entry for p, entry in entries.items() if window is None or p > position - window]
                seen.append((np.stack([k for k, _ in inside]), np.stack([v for _, v in inside])))
            out = np.concatenate([self._attend(q[h], *seen[h // (HEADS // KV_HEADS)]) for h in range(HEADS)])
            x = x + out @ w[f"{layer}.o"]
            x = x + np.maximum(self._norm(x) @ w[f"{layer}.up"], 0) @ w[f"{layer}.down"]
        return (self._norm(x) @ w["head"]).astype(np.float32)

    @staticmethod
    def _attend(q: Array, keys: Array, values: Array) -> Array:
        scores = keys @ q / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max())
        return weights @ values / weights.sum()

    @staticmethod
    def _norm(x: Array) -> Array:
        return x / np.sqrt(np.mean(x * x) + 1e-6)

    @staticmethod
    def _rope(x: Array, position: int) -> Array:
        angles = position * ROPE_BASE ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        a, b = x[:, : HEAD_DIM // 2], x[:, HEAD_DIM // 2 :]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=1)
