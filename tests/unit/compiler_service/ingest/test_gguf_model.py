"""A GGUF file gives the model it was written from: config, names, orders and values."""

import gguf
import pytest
import torch

from compiler_service.ingest.gguf_model import open_gguf
from compiler_service.ingest.tokenizer import tokenizer_of_gguf
from shared.errors import SourceInvalid, UnsupportedModel
from tests.support.decoders import FAMILIES, WINDOW
from tests.support.sources import BOS_ID, EOS_ID, VOCAB, source_config, write_gguf


@pytest.mark.parametrize("family", FAMILIES)
def test_unpacked_weights_come_back_exactly(tmp_path, family):
    model = write_gguf(tmp_path / "m.gguf", family)
    found = open_gguf(tmp_path / "m.gguf")
    wanted = model.state_dict()
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    got = dict(found.tensors())
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        # Gemma's norms go through +1 and -1 in float32.
        torch.testing.assert_close(got[name], values, rtol=0, atol=1e-6 if "norm" in name else 0)
    assert (found.name, found.bos_token_id, found.eos_token_ids) == (f"tiny {family}", BOS_ID, (EOS_ID,))


COMMON_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "tie_word_embeddings",
    "hidden_act",
    "model_type",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_describes_the_same_decoder(tmp_path, family):
    write_gguf(tmp_path / "m.gguf", family)
    got, wanted = open_gguf(tmp_path / "m.gguf").config, source_config(family)
    for field in COMMON_FIELDS:
        assert getattr(got, field, None) == getattr(wanted, field, None), field
    assert got.rms_norm_eps == pytest.approx(wanted.rms_norm_eps)
    assert (got.head_dim or 0) == (wanted.head_dim or wanted.hidden_size // wanted.num_attention_heads)


@pytest.mark.parametrize("packing", ["Q4_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_packed_weights_are_the_format_librarys_values(tmp_path, packing):
    kind = gguf.GGMLQuantizationType[packing]
    model = write_gguf(tmp_path / "m.gguf", "qwen3", packing=kind)
    got = dict(open_gguf(tmp_path / "m.gguf").tensors())
    for name, values in model.state_dict().items():
        if values.dim() == 2:
            oracle = gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind)
            assert torch.equal(got[name], torch.from_numpy(oracle)), name


def test_llama_heads_are_put_back_in_order(tmp_path):
    """By value: a wrong order has the right shape."""
    model = write_gguf(tmp_path / "m.gguf", "llama")
    stored = gguf.GGUFReader(tmp_path / "m.gguf")
    raw = next(tensor.data for tensor in stored.tensors if tensor.name == "blk.0.attn_q.weight")
    wanted = model.model.layers[0].self_attn.q_proj.weight
    assert not torch.equal(torch.from_numpy(raw.copy()), wanted)
    assert torch.equal(dict(open_gguf(tmp_path / "m.gguf").tensors())["model.layers.0.self_attn.q_proj.weight"], wanted)


def test_rotary_settings(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", rope__freq_base=5e5, rope__scaling__type="linear", rope__scaling__factor=4.0)
    rope = open_gguf(tmp_path / "m.gguf").config.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("linear", 5e5, 4.0)


def test_gemma_has_windows_and_two_rotations(tmp_path):
    write_gguf(tmp_path / "m.gguf", "gemma3", rope__freq_base=1e6)
    config = open_gguf(tmp_path / "m.gguf").config
    assert config.sliding_window == WINDOW
    assert config.layer_types == ["sliding_attention"] * 3  # full attention in each sixth layer
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert config.query_pre_attn_scalar == 32


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"block_count": 3}, SourceInvalid, "num_hidden_layers is 3, the weights hold 2 layers"),
        ({"block_count": 1 << 31}, SourceInvalid, "num_hidden_layers must be an integer from 1 to 512"),
        ({"block_count": 2.0}, SourceInvalid, "num_hidden_layers must be an integer"),
        ({"embedding_length": 96}, SourceInvalid, r"embed_tokens.weight should be \[400, 96\] and is \[400, 64\]"),
        ({"feed_forward_length": 97}, SourceInvalid, "should be"),
        ({"attention__head_count": 8}, SourceInvalid, "should be"),
        ({"attention__head_count": 0}, SourceInvalid, "num_attention_heads must be an integer from 1"),
        ({"attention__head_count_kv": 3}, SourceInvalid, "must be a multiple"),
        ({"attention__head_count": "many"}, SourceInvalid, "num_attention_heads must be an integer"),
        ({"attention__layer_norm_rms_epsilon": "x"}, SourceInvalid, "epsilon must be a positive number"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, SourceInvalid, "epsilon must be a positive number"),
        ({"rope__freq_base": -1.0}, SourceInvalid, "freq_base must be a positive number"),
        ({"rope__scaling__type": "yarn"}, UnsupportedModel, "none or linear"),
        ({"rope__scaling__type": "linear"}, SourceInvalid, "lacks llama.rope.scaling.factor"),
        ({"rope__dimension_count": 8}, UnsupportedModel, "rope.dimension_count must equal the head dimension 16"),
        ({"attention__value_length": 8}, UnsupportedModel, "value_length must equal the head dimension 16"),
    ],
)
def test_metadata_that_disagrees(tmp_path, metadata, error, message):
    write_gguf(tmp_path / "m.gguf", "llama", **metadata)
    with pytest.raises(error, match=message):
        open_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "metadata",
    [{"attention__head_count": 0}, {"attention__head_count": "many"}, {"embedding_length": "x"}, {"attention__key_length": "x"}],
)
@pytest.mark.parametrize("layers", [3, 62])
def test_sizes_that_gemma_derives_others_from(tmp_path, metadata, layers):
    write_gguf(tmp_path / "m.gguf", "gemma3", block_count=layers, **metadata)
    with pytest.raises(SourceInvalid, match="must be an integer from 1"):
        open_gguf(tmp_path / "m.gguf")


def test_another_architecture(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama")
    raw = (tmp_path / "m.gguf").read_bytes()
    assert raw.count(b"llama\x09") == 0
    (tmp_path / "m.gguf").write_bytes(raw.replace(b"llama", b"mamba"))
    with pytest.raises(UnsupportedModel, match="llama, qwen3, gemma3; the file declares 'mamba'"):
        open_gguf(tmp_path / "m.gguf")


def test_one_part_of_several(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", parts=3)
    with pytest.raises(UnsupportedModel, match="one of 3 parts"):
        open_gguf(tmp_path / "m.gguf")


def test_tensors_of_another_kind(tmp_path):
    """A mixture of experts calls itself llama as well; so does a file with rotary factors the config cannot say."""
    write_gguf(tmp_path / "m.gguf", "llama")
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw.replace(b"blk.1.ffn_gate.weight", b"blk.1.ffn_ring.weight"))
    with pytest.raises(UnsupportedModel, match=r"blk\.1\.ffn_ring\.weight"):
        open_gguf(tmp_path / "m.gguf")


def test_a_missing_tensor_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama")
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw.replace(b"blk.1.ffn_gate.weight", b"blk.0.ffn_gate.weighu"))
    with pytest.raises(UnsupportedModel):
        open_gguf(tmp_path / "m.gguf")


def test_more_tokens_than_embeddings(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.sources.VOCAB", VOCAB + 16)
    write_gguf(tmp_path / "m.gguf", "llama")
    raw = (tmp_path / "m.gguf").read_bytes()
    # The vocabulary axis of the embedding, in its tensor info: [64, 416] -> [64, 384].
    at = raw.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 8
    (tmp_path / "m.gguf").write_bytes(raw[:at] + (384).to_bytes(8, "little") + raw[at + 8 :])
    with pytest.raises(SourceInvalid, match="tokens and embeddings for 384"):
        open_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("merges", [["zz qq"], ["zzqq"], []])
def test_a_vocabulary_that_makes_no_tokenizer(tmp_path, monkeypatch, merges):
    write = gguf.GGUFWriter.add_token_merges
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda writer, _: write(writer, merges) if merges else None)
    write_gguf(tmp_path / "m.gguf", "llama")
    with pytest.raises(SourceInvalid, match="no tokenizer can be made"):
        tokenizer_of_gguf(tmp_path / "m.gguf")
