"""What a caller names is recognised, and confined to the model roots."""

import pytest

from compiler_service.ingest.source import SourceKind, locate
from shared.errors import FieldOutOfRange, ModelNotFound, SourceInvalid, UnsafeSource, UnsupportedModel


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "models"
    (root / "llama").mkdir(parents=True)
    (root / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "m.gguf").write_bytes(b"GGUF")
    return root


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", SourceKind.CHECKPOINT),
        ("m.gguf", SourceKind.GGUF),
        ("M.GGUF", SourceKind.GGUF),
        ("m.whl", SourceKind.WHEEL),
        ("m.pt2", SourceKind.PROGRAM),
    ],
)
def test_kinds(root, name, kind):
    if not (root / name).exists():
        (root / name).write_bytes(b"x")
    by_name, by_path = locate(name, [root]), locate(str(root / name), [root])
    assert by_name == by_path
    assert (by_name.kind, by_name.path) == (kind, root / name)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("weights.bin", UnsafeSource),
        ("weights.pt", UnsafeSource),
        ("weights.PTH", UnsafeSource),
        ("weights.pkl", UnsafeSource),
        ("weights.onnx", UnsupportedModel),
        ("weights", UnsupportedModel),
    ],
)
def test_what_is_not_taken(root, name, error):
    (root / name).write_bytes(b"x")
    with pytest.raises(error):
        locate(name, [root])


@pytest.mark.parametrize(
    "text", ["../secret/m.gguf", "llama/../../secret/m.gguf", "{outside}/m.gguf", "/etc/passwd", "~/m.gguf", "/"]
)
def test_traversal_is_refused_whether_or_not_something_is_there(root, tmp_path, text):
    """The refusal must not tell what exists outside the roots."""
    with pytest.raises((FieldOutOfRange, ModelNotFound)) as refused:
        locate(text.format(outside=tmp_path / "secret"), [root])
    assert refused.value.field == "source"
    if "secret" in text or text.startswith("/"):
        assert isinstance(refused.value, FieldOutOfRange)


def test_dots_are_refused_even_where_they_stay_inside(root):
    with pytest.raises(FieldOutOfRange, match=r"'\.\.'"):
        locate(f"{root}/llama/../m.gguf", [root])


@pytest.mark.parametrize("text", ["", "a\0b"])
def test_text_that_is_no_path(root, text):
    with pytest.raises(FieldOutOfRange):
        locate(text, [root])


def test_links_out_of_the_roots_are_refused(root, tmp_path):
    (root / "link.gguf").symlink_to(tmp_path / "secret" / "m.gguf")
    (root / "folder").symlink_to(tmp_path / "secret")
    for name in ("link.gguf", "folder", "folder/m.gguf"):
        with pytest.raises(FieldOutOfRange, match="under a model root"):
            locate(name, [root])


def test_links_inside_the_roots_are_followed(root):
    (root / "link.gguf").symlink_to(root / "m.gguf")
    assert locate("link.gguf", [root]).path == root / "m.gguf"


def test_a_file_of_a_checkpoint_may_link_inside_the_roots_only(root, tmp_path):
    """The hub's cache keeps its files as links to blobs beside the directory."""
    (root / "blob").write_text("{}")
    (root / "llama" / "config.json").symlink_to(root / "blob")
    (root / "llama" / "tokenizer.json").symlink_to(tmp_path / "secret" / "m.gguf")
    source = locate("llama", [root])
    assert source.file("config.json") == root / "blob"
    with pytest.raises(FieldOutOfRange):
        source.file("tokenizer.json")
    with pytest.raises(FieldOutOfRange):
        source.file("../../secret/m.gguf")


def test_a_root_that_is_a_link_is_a_root(root, tmp_path):
    (tmp_path / "alias").symlink_to(root)
    assert locate(str(tmp_path / "alias" / "m.gguf"), [tmp_path / "alias"]).path == root / "m.gguf"


def test_a_sibling_that_shares_a_prefix_is_outside(root, tmp_path):
    (tmp_path / "models-private").mkdir()
    with pytest.raises(FieldOutOfRange):
        locate(str(tmp_path / "models-private"), [root])


def test_a_relative_name_is_looked_up_in_every_root(root, tmp_path):
    other = tmp_path / "other"
    (other / "qwen").mkdir(parents=True)
    assert locate("qwen", [root, other]).path == other / "qwen"
    with pytest.raises(ModelNotFound):
        locate("gemma", [root, other])


def test_without_roots_any_path_goes(root, tmp_path):
    assert locate(str(tmp_path / "secret" / "m.gguf"), None).path == tmp_path / "secret" / "m.gguf"
    assert locate(f"{root}/../secret/m.gguf", None).path == tmp_path / "secret" / "m.gguf"
    with pytest.raises(ModelNotFound):
        locate(str(tmp_path / "absent"), None)


def test_a_device_is_no_source():
    with pytest.raises(SourceInvalid, match="neither"):
        locate("/dev/null", None)
