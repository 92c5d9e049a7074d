"""The key of an engine covers everything that goes into it; its manifest, everything that came out."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from compiler_service.backends.backend import BuiltEngine
from compiler_service.ingest.model import IngestedModel
from compiler_service.lowering.lower import lower_to_linear, lower_to_pools
from compiler_service.proof.decoder import prove_decoder
from compiler_service.publish import certify, describe_graph, engine_key, engine_manifest
from shared.artifacts.key import explain_difference
from shared.bindings import AliasedBinding, pool_name
from shared.errors import BuildFailed
from shared.kv_spec import Layout
from shared.manifest import (
    SCHEMA_VERSION,
    FileEntry,
    ModelFacts,
    ModelManifest,
    Target,
    WriteCertificate,
    decode_engine_manifest,
    encode_manifest,
)
from shared.profiles import ProfileSet
from tests.support.decoders import tiny_config

TARGET = Target("cpu", ("avx2",), ())
TOOLCHAIN = {"torch": "2.14.1", "cpp": "g++ 12"}


def model(**digests):
    files = {"config.json": "1" * 64, "tokenizer.json": "2" * 64, "weights.safetensors": "3" * 64} | digests
    facts = ModelFacts("a" * 64, "tiny", "LlamaForCausalLM", 97, 2, 4, 512, None, (1,), "float32", 100)
    entries = tuple(FileEntry(name, digest, 1) for name, digest in files.items())
    return IngestedModel(
        tiny_config("llama"), ModelManifest(SCHEMA_VERSION, "a" * 64, "model", facts, entries), Path("weights"), Path("tokenizer")
    )


@pytest.fixture
def program(exported):
    return exported("llama", Layout.PAGED)


def edited(program, edit):
    """The program with its graph changed by `edit`."""
    changed = copy.deepcopy(program.program)
    edit(changed.graph)
    return dataclasses.replace(program, program=changed)


def swap_operands(graph):
    """Another edge, the same nodes in the same order."""
    node = next(n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor and isinstance(n.args[1], torch.fx.Node))
    node.args = node.args[::-1]


def change_a_constant(graph):
    node = next(n for n in graph.nodes if n.op == "call_function" and any(isinstance(arg, int) for arg in n.args))
    node.args = tuple(arg + 1 if type(arg) is int else arg for arg in node.args)


def change_an_operator(graph):
    node = next(n for n in graph.nodes if n.target is torch.ops.aten.add.Tensor)
    node.target = torch.ops.aten.sub.Tensor


def test_the_same_inputs_give_the_same_key(program):
    assert engine_key(model(), program, "inductor", TARGET, TOOLCHAIN, {}) == engine_key(
        model(), copy.deepcopy(program), "inductor", TARGET, TOOLCHAIN, {}
    )


@pytest.mark.parametrize(
    ("component", "change"),
    [
        ("weights", lambda m, p: (model(**{"weights.safetensors": "4" * 64}), p)),
        ("config", lambda m, p: (model(**{"config.json": "4" * 64}), p)),
        ("tokenizer", lambda m, p: (model(**{"tokenizer.json": "4" * 64}), p)),
        ("graph", lambda m, p: (m, edited(p, swap_operands))),
        ("graph", lambda m, p: (m, edited(p, change_a_constant))),
        ("graph", lambda m, p: (m, edited(p, change_an_operator))),
        ("graph", lambda m, p: (m, dataclasses.replace(p, inputs=dict(reversed(p.inputs.items()))))),
        ("constants", lambda m, p: (m, dataclasses.replace(p, constants={k: v * 2 for k, v in p.constants.items()}))),
        ("weight_names", lambda m, p: (m, dataclasses.replace(p, weights=dict.fromkeys(p.weights, "other")))),
        ("profiles", lambda m, p: (m, dataclasses.replace(p, profiles=ProfileSet(p.profiles.profiles[::-1])))),
        ("cache", lambda m, p: (m, dataclasses.replace(p, cache=dataclasses.replace(p.cache, page_size=16)))),
    ],
)
def test_each_part_changes_the_key_and_is_named(program, component, change):
    """BR-140: a key without edges, constants, weights or profile order serves a wrong engine."""
    base = engine_key(model(), program, "inductor", TARGET, TOOLCHAIN, {})
    other = engine_key(*change(model(), program), "inductor", TARGET, TOOLCHAIN, {})
    assert other.artifact_id != base.artifact_id
    assert explain_difference(base.components, other.components) == [component]


def test_options_of_the_backend_count(program):
    keys = [engine_key(model(), program, "tensorrt_rtx", TARGET, TOOLCHAIN, {"constant_weights": own}) for own in (False, True)]
    assert explain_difference(*(key.components for key in keys)) == ["options"]


@pytest.mark.parametrize("component", ["target", "toolchain"])
def test_where_and_with_what_it_is_built_counts(program, component):
    base = engine_key(model(), program, "inductor", TARGET, TOOLCHAIN, {})
    target = Target("cpu", ("avx2", "avx512f"), ()) if component == "target" else TARGET
    toolchain = TOOLCHAIN | {"cpp": "g++ 13"} if component == "toolchain" else TOOLCHAIN
    other = engine_key(model(), program, "inductor", target, toolchain, {})
    assert explain_difference(base.components, other.components) == [component]


def test_toolchain_order_does_not_count(program):
    swapped = dict(reversed(TOOLCHAIN.items()))
    assert engine_key(model(), program, "inductor", TARGET, swapped, {}) == engine_key(
        model(), program, "inductor", TARGET, TOOLCHAIN, {}
    )


def test_names_of_sizes_do_not_count(program):
    """Lowering again in one process gives the same engine under other names for its sizes."""
    proven = prove_decoder(program, lower_to_linear(program)).proven_nodes
    first, again = (lower_to_pools(lower_to_linear(program), proven) for _ in range(2))
    assert str(first.program.range_constraints) != str(again.program.range_constraints)
    assert describe_graph(first) == describe_graph(again)


def test_ranges_of_sizes_count(program):
    narrow = dataclasses.replace(program, program=copy.deepcopy(program.program))
    size, bounds = next(iter(narrow.program.range_constraints.items()))
    narrow.program.range_constraints[size] = type(bounds)(bounds.lower, bounds.upper - 1)
    assert describe_graph(narrow) != describe_graph(program)


def test_the_description_tells_families_and_layouts_apart(exported):
    texts = [describe_graph(exported(family, Layout.PAGED)) for family in ("llama", "qwen3", "gemma3")]
    assert texts[0] != texts[1] != texts[2] != texts[0]


def certificate(cache, binding="", aliased=False):
    return WriteCertificate(cache, "n", "index_put", 2, "write_start", "n", "proved", "proved", binding, aliased, "")


def alias_of(cache):
    return AliasedBinding(pool_name(int(cache.split(".")[1])), pool_name(int(cache.split(".")[1])))


def test_certificates_get_the_engines_side():
    names = ("k_cache.0", "v_cache.0", "k_cache.11", "v_cache.11")
    aliases = [AliasedBinding(pool_name(layer), pool_name(layer)) for layer in (0, 11)]
    assert certify([certificate(name) for name in names], aliases, alias_of) == tuple(
        certificate(name, pool_name(int(name.split(".")[1])), aliased=True) for name in names
    )


@pytest.mark.parametrize("aliases", [[], [AliasedBinding("kv_pool.0", "kv_pool.0")], [AliasedBinding("kv_pool.1", "logits")]])
def test_a_proven_write_that_is_not_in_place_stops_the_build(aliases):
    with pytest.raises(BuildFailed, match=r"k_cache\.1"):
        certify([certificate("k_cache.0"), certificate("k_cache.1")], aliases, alias_of)


def test_the_manifest_lists_every_file_and_reads_back(program, tmp_path):
    (tmp_path / "package" / "deep").mkdir(parents=True)
    (tmp_path / "package" / "deep" / "x.so").write_bytes(b"code")
    (tmp_path / "constants.safetensors").write_bytes(b"c")
    built = BuiltEngine(tmp_path, TARGET, TOOLCHAIN, (), (), {"m.w": "w"})
    key = engine_key(model(), program, "inductor", TARGET, TOOLCHAIN, {})
    manifest = engine_manifest(key, model(), program, "inductor", built, (certificate("k_cache.0"),))
    assert [entry.path for entry in manifest.files] == ["constants.safetensors", "package/deep/x.so"]
    assert manifest.files[1].size == 4
    assert (manifest.artifact_id, manifest.model.model_id) == (key.artifact_id, "a" * 64)
    assert manifest.key_components == dict(key.components)
    assert decode_engine_manifest(encode_manifest(manifest)) == manifest
