"""What this host can build is known before any work is done."""

from __future__ import annotations

import sys

import pytest
import torch

from compiler_service.backends.tensorrt import flavour
from compiler_service.backends.tensorrt.build import MOST_ELEMENTS, check_aliases, most_pages, pool_extents
from compiler_service.backends.tensorrt.flavour import Flavour, require_buildable
from shared.bindings import AliasedBinding
from shared.errors import BackendUnavailable, BuildFailed, FieldOutOfRange
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.profiles import parse_profile


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flavour.importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("everything_installed")
def test_the_datacentre_flavour_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="needs an NVIDIA GPU"):
        require_buildable(Flavour.DATACENTRE, ("sm90",))
    require_buildable(Flavour.RTX, ("sm80", "sm89", "sm120"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_buildable(Flavour.DATACENTRE, ("sm90",))
    assert "torch_tensorrt" not in sys.modules, "looking must not import"


@pytest.mark.parametrize("missing", ["torch_tensorrt", "tensorrt_rtx"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(flavour.importlib.util, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(BackendUnavailable, match=f"package {missing};"):
        require_buildable(Flavour.RTX, ("sm80",))


@pytest.mark.usefixtures("everything_installed")
def test_targets_are_those_of_the_flavour() -> None:
    with pytest.raises(FieldOutOfRange, match="got sm90"):
        require_buildable(Flavour.RTX, ("sm80", "sm90"))


def alias(cache: str) -> AliasedBinding:
    return AliasedBinding(cache, f"{cache}.updated")


def test_a_cache_that_is_not_aliased_stops_the_build() -> None:
    """BR-004: what the network marked decides, not what was predicted."""
    whole = [alias(f"{kind}_cache.{layer}") for kind in "kv" for layer in range(2)]
    wanted = {f"{kind}_cache.{layer}" for kind in "kv" for layer in range(2)}
    check_aliases(whole, wanted)
    with pytest.raises(BuildFailed, match=r"1 of 4 caches .* v_cache\.1"):
        check_aliases(whole[:-1], wanted)
    with pytest.raises(BuildFailed, match="got 5"):
        check_aliases([*whole, alias("k_cache.0")], wanted)


@pytest.mark.parametrize(("max_len", "page_size"), [(2048, 64), (131072, 256)])
def test_a_plan_takes_the_largest_pool_tensorrt_can_count(max_len: int, page_size: int) -> None:
    """The usual size never passes it, however many long sequences a batch has."""
    spec = KVCacheSpec((LayerGroup((0, 1), 8, 128, DType.BFLOAT16),), Layout.PAGED, page_size, max_len)
    elements = 2 * 8 * page_size * 128
    assert most_pages(spec) * elements <= MOST_ELEMENTS < (most_pages(spec) + 1) * elements
    for profile in ("decode=64x1", "prefill=8x128"):
        for least, usual, largest in pool_extents(parse_profile(profile), spec).values():
            assert 0 < least <= usual <= largest
