"""What a launch binds, records and waits for; TensorRT and the GPU here are host memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
import torch

from runtime_service.core.params import SamplingParams
from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.tensorrt import launch
from runtime_service.engine.tensorrt.engine import TensorRTEngine
from runtime_service.engine.weights import ModelWeights
from runtime_service.kv.pool import KVPool
from shared.bindings import LOGITS, BindingSpec, Role, updated_name
from shared.errors import EngineIncompatible
from shared.kv_spec import Layout
from tests.support.fake_tensorrt import TRT, FakeTorch, TinyPlan
from tests.support.serving import request, run, serving, submit
from tests.support.tiny_engine import HEAD_DIM, KV_HEADS, Oracle, TinyEngine

PROFILES = ("decode=8x1", "prefill=2x16")
PROMPTS = [[1, 2, 3], [7] * 20, [5], list(range(30, 47)), [9, 8]]
EXPECTED = [Oracle().expected_tokens(prompt, 6 + 3 * i) for i, prompt in enumerate(PROMPTS)]


@dataclass
class Planned:
    """A TensorRTEngine and what it runs on. `copied` caches have no alias: their outputs are copies."""

    monkeypatch: pytest.MonkeyPatch
    layout: Layout = Layout.LINEAR
    graphs: bool = True
    copied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.gpu = FakeTorch()
        self.monkeypatch.setattr(launch, "torch", self.gpu)
        self.plan = TinyPlan(TinyEngine(layout=self.layout, profiles=PROFILES), self.gpu)
        plain = self.plan.engine.manifest
        shape = (None, KV_HEADS, plain.cache.max_len, HEAD_DIM)
        outputs = tuple(BindingSpec(updated_name(name), Role.OUTPUT, "float32", shape) for name in self.copied)
        outputs += (BindingSpec(LOGITS, Role.OUTPUT, "float32", (None, plain.model.vocab_size)),)
        self.manifest = replace(plain, bindings=plain.bindings + outputs)
        launcher = launch.Launcher(TRT, self.plan, self.manifest, {})
        self.engine = TensorRTEngine(self.manifest, launcher, ModelWeights({}), ExitStack(), graphs=self.graphs)

    def pool(self, num_pages: int = 9) -> KVPool:
        return KVPool(self.manifest.cache, num_pages)

    def step(self, pool: KVPool, slots: list[int], start: int, token: int = 5) -> torch.Tensor:
        """A decode step of `token` in each of those slots."""
        starts = torch.full((len(slots),), start, dtype=torch.int32)
        ids, last = torch.full((len(slots), 1), token, dtype=torch.int32), torch.zeros(len(slots), dtype=torch.int32)
        table = torch.tensor(slots, dtype=torch.int32)[:, None]
        return self.engine.run(EngineInputs("decode", ids, starts[:, None].contiguous(), starts, last, table), pool)


@pytest.mark.parametrize(
    ("layout", "graphs", "copied"),
    [
        (Layout.LINEAR, True, ()),
        (Layout.PAGED, True, ()),
        (Layout.PAGED, False, ()),
        (Layout.LINEAR, False, ("v_cache.0", "k_cache.1")),
    ],
)
def test_served_streams_get_their_tokens_from_what_is_bound(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, graphs: bool, copied: tuple[str, ...]
) -> None:
    """Replayed or launched, in place or over copies, in one launch a step or several, drawn where logits lie or by the host."""
    planned = Planned(monkeypatch, layout, graphs, copied)
    loop = serving(planned.engine, num_pages={Layout.LINEAR: 8, Layout.PAGED: 120}[layout])
    by_the_host = SamplingParams(temperature=0.0, logprobs=1)
    wanted = [request(prompt, 6 + 3 * i, sampling=by_the_host if i == 3 else None) for i, prompt in enumerate(PROMPTS)]
    streams = submit(loop, *wanted)
    run(loop)
    assert [stream.tokens() for stream in streams] == EXPECTED


def test_steady_decode_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, seen = Planned(monkeypatch), []
    pool = planned.pool()
    for start in range(6):
        planned.step(pool, [2, 3, 6], start)
        seen.append((planned.gpu.waits, len(planned.plan.contexts)))
    assert seen[1:] == [seen[0]] * 5, "recorded once for each of the two launches of a step, then replayed"
    planned.step(pool, [2, 3, 4], 6)
    assert len(planned.plan.contexts) == seen[0][1] + 1, "three neighbours are another launch"


def test_a_graph_waits_for_kernels_of_its_shape_and_a_prefill_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph has recorded it keeps; prefills come in every length."""
    planned = Planned(monkeypatch)
    loop = serving(planned.engine, num_pages=8)
    submit(loop, request(PROMPTS[0], 4))
    run(loop)
    strategies, kernels = zip(*planned.plan.contexts, strict=True)
    assert strategies == ("lazy", "eager")
    assert kernels[0] is kernels[1], "compiled once for all contexts"


def test_a_step_on_another_pool_waits_for_the_last_one_before_it_lets_go_of_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(monkeypatch)
    first, second = planned.pool(), planned.pool()
    planned.step(first, [1], 0)
    waits = planned.gpu.waits
    planned.step(second, [1], 0)
    assert planned.gpu.waits == waits + 2, "one before it lets go, one before it records"
    assert all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))


def test_graphs_that_were_not_used_for_longest_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_GRAPHS", 2)
    planned = Planned(monkeypatch)
    pool = planned.pool()
    for slots in ([1], [2], [1], [3], [1]):
        planned.step(pool, slots, 0)
    assert len(planned.plan.contexts) == 3
    planned.step(pool, [2], 0)
    assert len(planned.plan.contexts) == 4


def test_logits_are_overwritten_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the Engine protocol has it: what is wanted for longer is copied."""
    planned = Planned(monkeypatch)
    pool = planned.pool()
    logits = planned.step(pool, [1], 0)
    kept = logits.clone()
    assert planned.step(pool, [1], 0, token=6).data_ptr() == logits.data_ptr()
    assert not torch.equal(kept, logits)


def test_more_pages_than_the_plan_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(monkeypatch, Layout.PAGED)
    with pytest.raises(EngineIncompatible, match="has 201 pages, the plan takes at most 200"):
        planned.step(planned.pool(201), [1], 0)
