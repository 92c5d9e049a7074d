"""Programs of others, adopted: same logits as `transformers`, caches written where the runtime says, strange programs refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from compiler_service.export.program import DecoderProgram
from compiler_service.ingest.program_caches import find_caches
from compiler_service.lowering.adopt import adopt_program
from compiler_service.lowering.lower import lower_to_linear
from compiler_service.proof.decoder import prove_decoder
from shared.errors import FieldOutOfRange, UnsupportedModel
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.profiles import ProfileSet, parse_profile
from tests.support.decoder_steps import JUNK, int32
from tests.support.decoders import last_logits, random_model, random_prompt, tiny_config
from tests.support.stock_export import StockStep, export_stock

# transformers' own recipe traces a model that notes its outputs in a global.
pytestmark = pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")

MAX_LEN, LONGEST = 24, 8
PROFILES = ("decode=1x1", "prefill=1x8")


def export_by_recipe(model: PreTrainedModel) -> ExportedProgram:
    """transformers' own recipe: `cache_position` as input, the lengths so far as buffers of their own."""
    model.generation_config = GenerationConfig(
        use_cache=True,
        cache_implementation="static",
        max_length=MAX_LEN,
        cache_config={"batch_size": 1, "max_cache_len": MAX_LEN},
    )
    step = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=MAX_LEN, device=torch.device("cpu"))
    inputs = {"input_ids": torch.zeros(1, 5, dtype=torch.int64), "cache_position": torch.arange(5)}
    length = Dim("length", min=1, max=LONGEST)
    return export(step, (), inputs, dynamic_shapes={"input_ids": {1: length}, "cache_position": {0: length}}, strict=True)


def adopt(exported: ExportedProgram, layers: int, heads: int, head_dim: int, *profiles: str) -> DecoderProgram:
    functional = exported.run_decompositions({})
    group = LayerGroup(tuple(range(layers)), heads, head_dim, DType.FLOAT32)
    wanted = ProfileSet(tuple(map(parse_profile, profiles or PROFILES)))
    return adopt_program(functional, find_caches(functional), KVCacheSpec((group,), Layout.LINEAR, MAX_LEN, MAX_LEN), wanted)


EXPORTS: dict[str, tuple[str, Callable[[PreTrainedModel], ExportedProgram]]] = {
    "llama by its own recipe": ("llama", export_by_recipe),
    "gemma 3 with windows": ("gemma3", lambda model: export_stock(model, MAX_LEN, LONGEST)),
}


@pytest.fixture(scope="module", params=EXPORTS)
def adopted(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, DecoderProgram]:
    family, exporting = EXPORTS[request.param]
    config = tiny_config(family)
    stock = random_model(config)
    model = random_model(config)
    model.set_attn_implementation("sdpa")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return stock, adopt(exporting(model), config.num_hidden_layers, config.num_key_value_heads, dim)


def test_it_says_what_the_model_says_past_the_window(adopted: tuple[PreTrainedModel, DecoderProgram]) -> None:
    """Prefill, then decode; cells behind the last token hold junk all the while, and keep it."""
    model, program = adopted
    module = program.program.module(check_guards=False)  # those of the inputs the source had
    group = program.cache.group_of(0)
    caches = [torch.full((1, group.kv_heads, MAX_LEN, group.head_dim), JUNK) for _ in range(2 * program.cache.num_layers)]
    tokens = random_prompt(12, seed=4)
    for start, end in ((0, 7), *((at, at + 1) for at in range(7, 12))):
        got = module(int32([tokens[start:end]]), int32([start]), int32([end - start - 1]), *caches)
        torch.testing.assert_close(got[0], last_logits(model, tokens[:end]), atol=2e-3, rtol=1e-3)
    for cache in caches:
        assert (cache[:, :, :12] != JUNK).any(-1).all()
        assert (cache[:, :, 12:] == JUNK).all()


def test_every_write_is_proved_from_write_start(adopted: tuple[PreTrainedModel, DecoderProgram]) -> None:
    _, program = adopted
    report = prove_decoder(program, lower_to_linear(program))
    report.require()
    assert {certificate.start for certificate in report.certificates} == {"write_start[0]"}


def test_nothing_but_caches_is_carried_on(adopted: tuple[PreTrainedModel, DecoderProgram]) -> None:
    """The recipe's own lengths are written before they are read: no state of the engine."""
    _, program = adopted
    changed = [spec.target for spec in program.program.graph_signature.output_specs if spec.target is not None]
    assert sorted(program.inputs[str(name)] for name in changed) == sorted(
        f"{kind}_cache.{layer}" for kind in "kv" for layer in range(program.cache.num_layers)
    )


class _Toy(nn.Module):
    """One layer whose K and V are the tokens themselves."""

    def __init__(self, batch: int = 1) -> None:
        super().__init__()
        self.register_buffer("key_cache", torch.zeros(batch, 1, MAX_LEN, 2))
        self.register_buffer("value_cache", torch.zeros(batch, 1, MAX_LEN, 2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, input_ids: Tensor, start: Tensor) -> Tensor:
        rows = input_ids[:, None, :, None].float().expand(-1, -1, -1, 2)
        cells = torch.arange(input_ids.shape[1]) + start
        self.key_cache.index_copy_(2, cells, rows)
        self.value_cache.index_copy_(2, cells, rows)
        return rows[:, 0] + (self.key_cache + self.value_cache).sum(2)


class _Counting(_Toy):
    def forward(self, input_ids: Tensor, start: Tensor) -> Tensor:
        self.seen.add_(1)
        return super().forward(input_ids, start)


class _Embedded(_Toy):
    def forward(self, input_ids: Tensor, start: Tensor) -> Tensor:
        return super().forward(input_ids.long(), start)


def toy(module: nn.Module, ids: Tensor, *profiles: str) -> DecoderProgram:
    length = Dim("length", min=1, max=LONGEST)
    exported = export(module, (ids, torch.tensor(0)), dynamic_shapes=({1: length}, None), strict=False)
    return adopt(exported, 1, 1, 2, *profiles)


def test_state_that_is_read_first_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="seen is state besides the K and V caches"):
        toy(_Counting(), torch.zeros(1, 5, dtype=torch.int64))


def test_inputs_of_other_kinds_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"input_ids is torch\.float32"):
        toy(_Embedded(), torch.zeros(1, 5))
    with pytest.raises(UnsupportedModel, match="must be 1 or dynamic; it is 2"):
        toy(_Toy(batch=2), torch.zeros(2, 5, dtype=torch.int64))


def test_a_profile_outside_the_export_is_refused() -> None:
    with pytest.raises(FieldOutOfRange, match=r"query length of 1 to 9; .* 1 to 8"):
        toy(_Toy(), torch.zeros(1, 5, dtype=torch.int64), "decode=1x1", "prefill=1x9")


class _Unpaired(_Toy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(1, 1, MAX_LEN, 2))

    def forward(self, input_ids: Tensor, start: Tensor) -> Tensor:
        self.state.add_(1.0)
        return super().forward(input_ids, start)


def test_a_cache_without_a_partner_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="state is written and is neither the keys nor the values"):
        toy(_Unpaired(), torch.zeros(1, 5, dtype=torch.int64))


class _Positioned(_Toy):
    def forward(self, input_ids: Tensor, position_ids: Tensor, start: Tensor) -> Tensor:
        return super().forward(input_ids + 100 * position_ids, start)


def test_positions_of_its_own_stay_an_input() -> None:
    """Such a program can be compacted: cells and positions are told apart."""
    ids = torch.zeros(1, 5, dtype=torch.int64)
    length = Dim("length", min=1, max=LONGEST)
    shapes = ({1: length}, {1: length}, None)
    program = adopt(export(_Positioned(), (ids, ids.clone(), torch.tensor(0)), dynamic_shapes=shapes, strict=False), 1, 1, 2)
    assert list(program.inputs.values()) == ["input_ids", "position_ids", "write_start", "last_index", "k_cache.0", "v_cache.0"]
    caches = [torch.zeros(1, 1, MAX_LEN, 2) for _ in "kv"]
    program.program.module(check_guards=False)(int32([[1, 2]]), int32([[7, 8]]), int32([3]), int32([1]), *caches)
    assert caches[0][0, 0, 2:6, 0].tolist() == [0, 701, 802, 0]


class _LastOnly(_Toy):
    def forward(self, input_ids: Tensor, start: Tensor) -> Tensor:
        return super().forward(input_ids, start)[:, -1]


def test_logits_of_the_last_token_alone_are_refused() -> None:
    """A prefill chunk is padded at its end, and its last real token is another."""
    with pytest.raises(UnsupportedModel, match=r"must be logits \[batch, length, vocabulary\]; it is \[1, 2\]"):
        toy(_LastOnly(), torch.zeros(1, 5, dtype=torch.int64))


@pytest.mark.parametrize(("length", "refused"), [(Dim("length", min=1), False), (Dim.AUTO, True)], ids=["named", "auto"])
def test_a_length_that_the_export_left_open_has_no_bound(length: Dim, refused: bool) -> None:
    """Left to itself torch.export takes a length for two at least, which no decode step has."""
    config = tiny_config("llama")
    step = StockStep(random_model(config), MAX_LEN)
    ids = torch.zeros(1, 5, dtype=torch.int64)
    exported = export(step, (ids, torch.tensor(3)), dynamic_shapes=({1: length}, None), strict=False)
    dim = config.hidden_size // config.num_attention_heads
    if refused:
        with pytest.raises(FieldOutOfRange, match="exported for 2 to any"):
            adopt(exported, config.num_hidden_layers, config.num_key_value_heads, dim)
        return
    program = adopt(exported, config.num_hidden_layers, config.num_key_value_heads, dim)
    assert prove_decoder(program, lower_to_linear(program)).ok
