"""A `.pt2` is read without unpickling or running anything in it; what could run code is refused before torch looks at it."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export, save

from compiler_service.ingest.program import ProgramModel, open_program
from compiler_service.ingest.source import locate
from shared.errors import FieldOutOfRange, QuireError, SourceInvalid, UnsafeSource, UnsupportedModel
from shared.kv_spec import Layout
from tests.support.tokenizers import byte_level_tokenizer

VOCAB, MAX_LEN = 300, 16


class _Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 4)
        self.register_buffer("scale", torch.tensor([0.5]))
        self.register_buffer("k", torch.zeros(1, 1, MAX_LEN, 4), persistent=False)
        self.register_buffer("v", torch.zeros(1, 1, MAX_LEN, 4), persistent=False)

    def forward(self, input_ids: Tensor, start: Tensor) -> Tensor:
        rows = self.embed(input_ids)[:, None]
        cells = torch.arange(input_ids.shape[1]) + start
        self.k.index_copy_(2, cells, rows)
        self.v.index_copy_(2, cells, rows * self.scale)
        seen = torch.nn.functional.scaled_dot_product_attention(rows, self.k, self.v)
        return seen[:, 0] @ self.embed.weight.T


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("program")
    inputs = (torch.zeros(1, 5, dtype=torch.int64), torch.tensor(2))
    save(export(_Step(), inputs, dynamic_shapes=({1: Dim("n", min=1, max=8)}, None)), directory / "model.pt2")
    byte_level_tokenizer(VOCAB).save(str(directory / "tokenizer.json"))
    return directory / "model.pt2"


def open_(path: Path) -> ProgramModel:
    return open_program(locate(str(path), None))


def test_facts_weights_and_caches_are_the_programs(whole: Path) -> None:
    found = open_(whole)
    assert (found.config.vocab_size, found.config.num_hidden_layers, found.config.max_position_embeddings) == (VOCAB, 1, MAX_LEN)
    assert dict(found.shapes) == {"embed.weight": (VOCAB, 4)}
    loaded = torch.export.load(whole)
    ((name, values),) = found.tensors()
    assert torch.equal(values, loaded.state_dict[name])
    spec = found.cache_spec(Layout.LINEAR, MAX_LEN, MAX_LEN)
    assert (spec.num_layers, spec.group_of(0).kv_heads, spec.group_of(0).head_dim) == (1, 1, 4)
    ids, start = torch.tensor([[3, 1, 2]]), torch.tensor(4)
    torch.testing.assert_close(found.program.module()(ids, start), loaded.module()(ids, start))


class _OneMemory(_Step):
    """Keys and values are views of one buffer, which the archive stores once."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        both = torch.zeros(1, 2, MAX_LEN, 4)
        self.register_buffer("k", both[:, :1])
        self.register_buffer("v", both[:, :1])


@pytest.mark.filterwarnings("ignore:No complete tensor found")
def test_caches_in_one_memory_are_refused_with_both_names(tmp_path: Path) -> None:
    """BR-014: as two caches, a write to one of them would no longer change the other."""
    save(export(_OneMemory(), (torch.zeros(1, 5, dtype=torch.int64), torch.tensor(2))), tmp_path / "model.pt2")
    byte_level_tokenizer(VOCAB).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="k and v are views of one memory"):
        open_(tmp_path / "model.pt2")


def test_what_the_program_fixes_cannot_be_asked_otherwise(whole: Path) -> None:
    found = open_(whole)
    with pytest.raises(FieldOutOfRange, match="max_len must be 16"):
        found.cache_spec(Layout.LINEAR, 32, 32)
    with pytest.raises(FieldOutOfRange, match="dtype must be float32"):
        found.require_dtype("bfloat16")


def rewritten(whole: Path, directory: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """The archive with every record changed; None drops it."""
    with zipfile.ZipFile(whole) as before, zipfile.ZipFile(directory / "model.pt2", "w") as after:
        for info in before.infolist():
            if (content := change(info.filename.partition("/")[2], before.read(info))) is not None:
                after.writestr(zipfile.ZipInfo(info.filename), content)
    (directory / "tokenizer.json").write_bytes(whole.with_name("tokenizer.json").read_bytes())
    return directory / "model.pt2"


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('unpickled')",))


BOMB = pickle.dumps(_Bomb())


def test_sample_inputs_are_never_looked_at(whole: Path, tmp_path: Path) -> None:
    path = rewritten(whole, tmp_path, lambda name, data: BOMB if "sample_inputs" in name else data)
    assert open_(path).shapes
    path = rewritten(whole, tmp_path, lambda name, data: None if "sample_inputs" in name else data)
    assert open_(path).shapes


def edited(edit: Callable[[dict[str, Any]], None], suffix: str = "models/model.json") -> Callable[[str, bytes], bytes]:
    def change(name: str, data: bytes) -> bytes:
        if name.endswith(suffix):
            fields = json.loads(data)
            edit(fields)
            return json.dumps(fields).encode()
        return data

    return change


def nodes(fields: dict[str, Any]) -> list[dict[str, Any]]:
    return fields["graph_module"]["graph"]["nodes"]


def call(target: str) -> Callable[[dict[str, Any]], None]:
    return lambda fields: nodes(fields)[0].update(target=target)


def size(text: str) -> Callable[[dict[str, Any]], None]:
    def edit(fields: dict[str, Any]) -> None:
        values = fields["graph_module"]["graph"]["sym_int_values"]
        next(iter(values.values()))["as_expr"]["expr_str"] = text

    return edit


def tree(kind: str) -> Callable[[dict[str, Any]], None]:
    def edit(fields: dict[str, Any]) -> None:
        signature = fields["graph_module"]["module_call_graph"][0]["signature"]
        spec = json.loads(signature["in_spec"])
        spec[1]["type"] = kind
        signature["in_spec"] = json.dumps(spec)

    return edit


def pickled(fields: dict[str, Any]) -> None:
    for meta in fields["config"].values():
        meta["use_pickle"] = True


def beyond(fields: dict[str, Any]) -> None:
    for meta in fields["config"].values():
        meta["tensor_meta"]["sizes"] = [{"as_int": 1 << 40}]
        meta["tensor_meta"]["strides"] = [{"as_int": 1}]


def described(**changes: object) -> Callable[[dict[str, Any]], None]:
    """Every tensor of an archive, told otherwise."""

    def edit(fields: dict[str, Any]) -> None:
        for meta in fields["config"].values():
            meta["tensor_meta"].update(changes)

    return edit


def misnamed(fields: dict[str, Any]) -> None:
    inputs = fields["graph_module"]["graph"]["inputs"]
    next(part for part in inputs if "as_tensor" in part)["as_tensor"]["name"] = "another"


ONE, NONE = {"as_int": 1}, {"as_int": 0}
HOSTILE: dict[str, tuple[Callable[[str, bytes], bytes], type[QuireError], str]] = {
    "an operator from elsewhere": (edited(call("torch.hub.load")), UnsupportedModel, "torch.hub.load"),
    "an operator by attributes": (edited(call("torch.ops.aten.__class__.mro")), SourceInvalid, "no program"),
    "an operator of a module": (edited(call("_operator.methodcaller")), UnsupportedModel, "methodcaller"),
    "a size that calls": (edited(size("__import__('os').system('true')")), UnsafeSource, "__import__"),
    "a size with an attribute": (edited(size("Integer(1).func")), UnsafeSource, "func"),
    "a tree that imports": (edited(tree("collections.defaultdict")), UnsafeSource, "defaultdict"),
    "weights to be unpickled": (edited(pickled, "weights_config.json"), UnsafeSource, "embed.weight is a pickle"),
    "constants to be unpickled": (edited(pickled, "constants_config.json"), UnsafeSource, "is a pickle"),
    "weights beyond the file": (edited(beyond, "weights_config.json"), SourceInvalid, "its record has 4800"),
    "a type that is none": (edited(described(dtype={}), "weights_config.json"), SourceInvalid, "no program"),
    "integers for weights": (edited(described(dtype=2), "weights_config.json"), SourceInvalid, "no program"),
    "more sizes than strides": (edited(described(sizes=[ONE], strides=[]), "weights_config.json"), SourceInvalid, "no program"),
    "weights of nothing": (edited(described(sizes=[NONE], strides=[ONE]), "weights_config.json"), SourceInvalid, "no program"),
    "an input of another name": (edited(misnamed), SourceInvalid, "no program"),
    "a graph of nothing": (edited(lambda f: f.update(graph_module=[])), SourceInvalid, "graph_module"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_could_run_code_is_refused(whole: Path, tmp_path: Path, name: str) -> None:
    change, error, told = HOSTILE[name]
    with pytest.raises(error, match=told):
        open_(rewritten(whole, tmp_path, change))


def test_guards_are_not_compiled(whole: Path, tmp_path: Path) -> None:
    path = rewritten(whole, tmp_path, edited(lambda fields: fields.update(guards_code=["exit()"])))
    open_(path).program.module()


def test_a_cut_archive_is_refused(whole: Path, tmp_path: Path) -> None:
    path = rewritten(whole, tmp_path, lambda name, data: data)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(SourceInvalid, match=r"is no \.pt2 archive"):
        open_(path)


def test_an_archive_without_a_program_is_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceInvalid, match="it holds 0"):
        open_(rewritten(whole, tmp_path, lambda name, data: None if "models" in name else data))


def test_the_old_format_is_refused(whole: Path, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({}, buffer)
    path = rewritten(whole, tmp_path, lambda name, data: data)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/data/weights/model.pt", buffer.getvalue())
    with pytest.raises(UnsafeSource, match=r"model\.pt is a pickle"):
        open_(path)


def test_a_program_needs_its_tokenizer(whole: Path, tmp_path: Path) -> None:
    path = rewritten(whole, tmp_path, lambda name, data: data)
    path.with_name("tokenizer.json").unlink()
    with pytest.raises(SourceInvalid, match=r"needs tokenizer\.json beside it"):
        open_(path)
