"""One export of every tiny decoder, shared by the tests of export, lowering and backends."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from compiler_service.export.geometry import cache_spec
from compiler_service.export.program import DecoderProgram, export_decoder
from shared.kv_spec import DType, Layout
from shared.profiles import ProfileSet, parse_profile
from tests.support.decoders import tiny_config

PROFILES = ProfileSet((parse_profile("decode=4x1"), parse_profile("prefill=3x32")))
MAX_LEN, PAGE_SIZE = 48, 8


@pytest.fixture(scope="session")
def exported() -> Callable[[str, Layout], DecoderProgram]:
    """(family, layout) -> its float32 export."""

    @cache
    def export(family: str, layout: Layout) -> DecoderProgram:
        config = tiny_config(family)
        page_size = PAGE_SIZE if layout is Layout.PAGED else MAX_LEN
        return export_decoder(config, cache_spec(config, DType.FLOAT32, layout, page_size, MAX_LEN), PROFILES)

    return export
