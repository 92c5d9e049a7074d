"""Artifact keys: everything that goes into a build counts, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from shared.artifacts.key import ArtifactKey, explain_difference
from shared.ids import check_artifact_id

BUILD: dict[str, Any] = {
    "weights": b"\x00\x01",
    "graph": {"nodes": ["a", "b"], "edges": [[0, 1]], "constants": {"x": 1.5}},
    "profiles": [{"name": "decode", "batch": [1, 8], "query": [1, 1]}, {"name": "prefill", "batch": [1, 1], "query": [1, 64]}],
    "dtype": "bfloat16",
    "cache": {"layout": "paged", "page_size": 16, "window": None},
    "toolchain": {"torch": "2.14.1"},
}


def changed(path: str, value: Any) -> ArtifactKey:
    build = copy.deepcopy(BUILD)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target: Any = build
    for parent in parents:
        target = target[parent]
    target[last] = value
    return ArtifactKey.of(build)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("profiles.1.query", [1, 128]),
        ("profiles", BUILD["profiles"][:1]),
        ("profiles", BUILD["profiles"][::-1]),
        ("dtype", "float16"),
        ("cache.window", 512),
        ("cache.page_size", 32),
        ("cache.layout", "linear"),
        ("graph.edges", [[1, 0]]),
        ("graph.constants", {"x": 1.25}),
        ("toolchain.torch", "2.14.2"),
        ("weights", b"\x00\x02"),
    ],
)
def test_everything_that_goes_into_a_build_counts(path: str, value: Any) -> None:
    """BR-140: T max 64 then 128; then precision, profile list, window, page size each alone."""
    key, other = ArtifactKey.of(BUILD), changed(path, value)
    assert key.artifact_id != other.artifact_id
    assert explain_difference(key.components, other.components) == [path.split(".")[0]]


def test_the_order_of_equal_options_does_not_count() -> None:
    """BR-140."""

    def reversed_maps(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: reversed_maps(item) for name, item in reversed(value.items())}
        return [reversed_maps(item) for item in value] if isinstance(value, list) else value

    key, other = ArtifactKey.of(BUILD), ArtifactKey.of(reversed_maps(BUILD))
    assert key == other
    assert key.artifact_id == other.artifact_id == check_artifact_id(key.artifact_id)
    assert explain_difference(key.components, other.components) == []


def test_a_key_is_the_same_in_every_process() -> None:
    """A golden value: a change of the canonical form makes every stored artifact a miss, so it must not happen by accident."""
    key = ArtifactKey.of({"a": b"x", "b": {"z": 1, "y": [1, 2]}, "c": "é"})
    assert key.artifact_id == GOLDEN


GOLDEN = "1634f1a805837e0ee203c655181dc03f7f47d432d42e49c4f1eb95a2c3fb6de8"


def test_values_of_different_kinds_do_not_collide() -> None:
    values: list[Any] = [b"1", "1", 1, 1.0, True, None, [1], {"1": 1}, b"", "", [], {}, "null", "true"]
    assert len({ArtifactKey.of({"x": value}).artifact_id for value in values}) == len(values)
    assert ArtifactKey.of({"ab": "c"}).artifact_id != ArtifactKey.of({"a": "bc"}).artifact_id
    assert ArtifactKey.of({"a": 1, "b": 2}).artifact_id != ArtifactKey.of({"a": 2, "b": 1}).artifact_id


def test_missing_components_are_named() -> None:
    key, less = ArtifactKey.of({"a": 1, "b": 2, "c": 3}), ArtifactKey.of({"a": 9, "b": 2})
    assert explain_difference(key.components, less.components) == explain_difference(less.components, key.components) == ["a", "c"]


def test_a_key_comes_back_from_its_stored_components() -> None:
    key = ArtifactKey.of(BUILD)
    assert ArtifactKey(dict(key.components)) == key


@pytest.mark.parametrize(
    "value", [{1: "a"}, [{"a": {None: 1}}], {True: 1}, {"a", "b"}, object(), float("nan"), float("inf"), "\ud800"]
)
def test_what_json_would_bend_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        ArtifactKey.of({"x": value})


@pytest.mark.parametrize("components", [{}, {"a": "0" * 63}, {"a": "G" * 64}, {"a": "A" * 64}])
def test_components_must_be_digests(components: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="component"):
        ArtifactKey(components)


def test_a_key_does_not_change() -> None:
    components = dict(ArtifactKey.of(BUILD).components)
    key = ArtifactKey(components)
    before = key.artifact_id
    components["dtype"] = "0" * 64
    assert key.artifact_id == before
    with pytest.raises(TypeError):
        key.components["dtype"] = "0" * 64  # type: ignore[index]
