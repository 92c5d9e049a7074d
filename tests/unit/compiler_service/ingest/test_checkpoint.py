"""A checkpoint directory is taken only where its files agree with each other."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiler_service.ingest.checkpoint import open_checkpoint
from compiler_service.ingest.checkpoint_files import source_files
from compiler_service.ingest.source import locate
from shared.errors import SourceInvalid, UnsafeSource, UnsupportedModel
from tests.support.decoders import FAMILIES
from tests.support.sources import EOS_ID, VOCAB, edit_json, write_checkpoint


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for family in FAMILIES:
        made[family] = tmp_path_factory.mktemp(family)
        write_checkpoint(made[family], family)
    made["sharded"] = tmp_path_factory.mktemp("sharded")
    write_checkpoint(made["sharded"], "llama", shard_size="100KB")
    return made


@pytest.fixture
def checkpoint(originals, tmp_path):
    """A private copy of one of the originals."""

    def copy(name: str = "llama") -> Path:
        return shutil.copytree(originals[name], tmp_path / name)

    return copy


def opened(directory: Path):
    return open_checkpoint(locate(str(directory), None))


def edit_weights(directory: Path, edit) -> None:
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    save_file(weights, directory / "model.safetensors")


@pytest.mark.parametrize("name", [*FAMILIES, "sharded"])
def test_the_weights_of_every_family(originals, name):
    found = opened(originals[name])
    stored = {k: v for file in originals[name].glob("*.safetensors") for k, v in load_file(file).items()}
    got = dict(found.tensors())
    assert got.keys() == stored.keys() == found.shapes.keys()
    assert all(torch.equal(got[k], stored[k]) and found.shapes[k] == tuple(stored[k].shape) for k in stored)
    assert (found.bos_token_id, found.eos_token_ids, found.config.vocab_size) == (0, (EOS_ID,), VOCAB)


def test_what_is_hashed_is_what_decides_the_model(originals, checkpoint):
    directory = checkpoint("sharded")
    (directory / "README.md").write_text("not part of it")
    names = {path.name for path in source_files(locate(str(directory), None))}
    shards = {path.name for path in originals["sharded"].glob("model-*.safetensors")}
    assert len(shards) > 2
    assert names == shards | {"config.json", "tokenizer.json", "generation_config.json", "model.safetensors.index.json"}


def test_missing_shards_are_listed(checkpoint):
    """BR-146: one of the shards is gone, and an unfinished download lies about."""
    directory = checkpoint("sharded")
    shards = sorted(directory.glob("model-*.safetensors"))
    for shard in shards[:2]:
        shard.rename(f"{shard}.incomplete")
    for read in (opened, lambda d: source_files(locate(str(d), None))):
        with pytest.raises(SourceInvalid) as refused:
            read(directory)
        assert all(shard.name in refused.value.message for shard in shards[:2])
        assert shards[2].name not in refused.value.message


def test_a_shard_name_cannot_leave_the_directory(checkpoint, tmp_path):
    directory = checkpoint("sharded")
    save_file({"x": torch.zeros(1)}, tmp_path / "outside.safetensors")
    index = directory / "model.safetensors.index.json"
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "a/b.safetensors", "weights.bin", 3):
        fields = json.loads(index.read_text())
        edit_json(index, weight_map=fields["weight_map"] | {"x": name})
        with pytest.raises(SourceInvalid, match=r"plain \.safetensors file names"):
            opened(directory)


def test_the_index_must_agree_with_the_shards(checkpoint):
    directory = checkpoint("sharded")
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first, last = sorted(set(weight_map.values()))[0], sorted(set(weight_map.values()))[-1]
    moved = next(name for name, shard in weight_map.items() if shard == first)
    edit_json(index, weight_map=weight_map | {moved: last})
    with pytest.raises(SourceInvalid, match=f"puts {moved} into {last}"):
        opened(directory)


def test_a_tensor_in_two_shards(checkpoint):
    directory = checkpoint("sharded")
    first, second = sorted(directory.glob("model-*.safetensors"))[:2]
    doubled = load_file(second) | dict(list(load_file(first).items())[:1])
    save_file(doubled, second)
    with pytest.raises(SourceInvalid, match=f"is in {first.name} and in {second.name}"):
        opened(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(checkpoint, name):
    directory = checkpoint()
    (directory / name).unlink()
    for read in (opened, lambda d: source_files(locate(str(d), None))):
        with pytest.raises(SourceInvalid, match=name):
            read(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickled_weights_are_refused_unread(checkpoint, name, tmp_path):
    """The pickle would leave a file behind if anything unpickled it."""
    directory, trap = checkpoint(), tmp_path / "unpickled"
    (directory / "model.safetensors").unlink()

    class Trap:
        def __reduce__(self):
            return (Path.touch, (trap,))

    (directory / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UnsafeSource, match=name):
        opened(directory)
    assert not trap.exists()


def test_remote_code_is_refused(checkpoint):
    directory = checkpoint()
    edit_json(directory / "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (directory / "modeling_evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnsafeSource, match="auto_map"):
        opened(directory)


@pytest.mark.parametrize(
    "declared", [None, [], ["MistralForCausalLM"], ["LlamaForCausalLM", "X"], "LlamaForCausalLM", [["LlamaForCausalLM"]]]
)
def test_other_architectures_are_refused_with_the_list(checkpoint, declared):
    directory = checkpoint()
    edit_json(directory / "config.json", architectures=declared)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM"):
        opened(directory)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_hidden_layers": 3}, SourceInvalid, "num_hidden_layers is 3, the weights hold 2 layers"),
        ({"num_hidden_layers": 1}, SourceInvalid, "num_hidden_layers is 1, the weights hold 2 layers"),
        ({"num_hidden_layers": 10**9}, SourceInvalid, "num_hidden_layers must be an integer from 1 to 512"),
        ({"num_hidden_layers": "2"}, SourceInvalid, "num_hidden_layers must be an integer"),
        ({"num_hidden_layers": None}, SourceInvalid, "lacks num_hidden_layers"),
        ({"hidden_size": 10**12}, SourceInvalid, "hidden_size must be an integer"),
        ({"hidden_size": 96}, SourceInvalid, r"embed_tokens.weight should be \[400, 96\] and is \[400, 64\]"),
        ({"intermediate_size": 97}, SourceInvalid, r"mlp.\w+_proj.weight should be"),
        ({"num_key_value_heads": 4}, SourceInvalid, r"k_proj.weight should be \[64, 64\] and is \[32, 64\]"),
        ({"num_key_value_heads": 3}, SourceInvalid, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 0}, SourceInvalid, "num_attention_heads must be an integer from 1"),
        ({"head_dim": 15}, SourceInvalid, "even rotary dimension"),
        ({"vocab_size": 399}, SourceInvalid, r"should be \[399, 64\] and is \[400, 64\]"),
        ({"vocab_size": True}, SourceInvalid, "vocab_size must be an integer"),
        ({"tie_word_embeddings": False}, SourceInvalid, "lm_head.weight is missing"),
        ({"attention_bias": True}, SourceInvalid, "q_proj.bias is missing"),
        ({"hidden_act": "nonsense"}, SourceInvalid, "hidden_act"),
        ({"rms_norm_eps": "small"}, SourceInvalid, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, UnsupportedModel, "rope type"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}},
            UnsupportedModel,
            "rope type",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "quantised"),
    ],
)
def test_config_and_weights_that_disagree(checkpoint, changes, error, message):
    directory = checkpoint()
    edit_json(directory / "config.json", **changes)
    with pytest.raises(error, match=message):
        opened(directory)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_types": ["full_attention"] * 2}, SourceInvalid, "layer_types|num_hidden_layers"),
        ({"layer_types": ["chunked_attention"] * 3}, SourceInvalid, "layer_types"),
        ({"sliding_window": None}, SourceInvalid, "sliding_window"),
        ({"sliding_window": 0}, SourceInvalid, "sliding_window"),
        ({"use_bidirectional_attention": True}, UnsupportedModel, "causal"),
    ],
)
def test_layers_of_a_gemma(checkpoint, changes, error, message):
    directory = checkpoint("gemma3")
    if changes.get("sliding_window", 1) is None:
        fields = json.loads((directory / "config.json").read_text()) | {"sliding_window": None}
        (directory / "config.json").write_text(json.dumps(fields))
    else:
        edit_json(directory / "config.json", **changes)
    with pytest.raises(error, match=message):
        opened(directory)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda w: w.update({"model.extra.weight": torch.zeros(1)}), "model.extra.weight is not a tensor of this model"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(63)}), r"model.norm.weight should be \[64\] and is \[63\]"),
        (lambda w: w.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(1)}), "the weights hold 3 layers, 0 to 7"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(VOCAB, 64)}), "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_weights_the_config_does_not_promise(checkpoint, edit, message):
    directory = checkpoint()
    edit_weights(directory, edit)
    with pytest.raises(SourceInvalid, match=message):
        opened(directory)


def test_a_tied_head_stored_twice_is_kept_once(checkpoint):
    directory = checkpoint()
    edit_weights(directory, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in opened(directory).shapes


def test_derived_tables_of_old_checkpoints_are_ignored(checkpoint):
    directory = checkpoint()
    edit_weights(directory, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert not any("inv_freq" in name for name in opened(directory).shapes)


def test_integer_weights_are_unsupported(checkpoint):
    directory = checkpoint()
    edit_weights(directory, lambda w: w.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is I8"):
        opened(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_files_that_are_not_what_their_name_says(checkpoint, name, content):
    directory = checkpoint()
    (directory / name).write_bytes(content)
    with pytest.raises(SourceInvalid):
        opened(directory)


def test_generation_config_decides_the_ends(checkpoint):
    directory = checkpoint()
    edit_json(directory / "generation_config.json", eos_token_id=[7, 3, 7])
    assert opened(directory).eos_token_ids == (3, 7)


@pytest.mark.parametrize("ids", [-1, VOCAB, 1.5, "1", [1, VOCAB], list(range(65))])
def test_token_ids_outside_the_vocabulary(checkpoint, ids):
    directory = checkpoint()
    edit_json(directory / "generation_config.json", eos_token_id=ids)
    with pytest.raises(SourceInvalid, match="eos_token_id"):
        opened(directory)


def test_a_file_that_cannot_be_read_is_the_sources_fault(checkpoint):
    """As on a disk that fails: this one is a regular file, and reading it an input/output error."""
    path = checkpoint()
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("/proc/self/mem")
    with pytest.raises(SourceInvalid, match="cannot be read"):
        open_checkpoint(locate(str(path), None))
