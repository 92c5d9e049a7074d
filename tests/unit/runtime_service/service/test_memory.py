"""Pool sizes from memory, with the system's files faked."""

from __future__ import annotations

import pytest

from runtime_service.service.memory import available_bytes, check_room, default_pages, pages_within
from shared.errors import MemoryExhausted
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout

SPEC = KVCacheSpec((LayerGroup((0, 1), kv_heads=2, head_dim=4, dtype=DType.FLOAT32),), Layout.PAGED, page_size=8, max_len=30)
PAGE = 2 * 2 * 4 * 4 * 2 * 8  # K and V, heads, head_dim, bytes, layers, tokens


@pytest.fixture
def system(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  2000 kB\nMemAvailable:    1000 kB\n")

    def read(limit=None, used="0", cached=0):
        if limit is not None:
            (tmp_path / "memory.stat").write_text(f"anon 7\nactive_file {cached}\ninactive_file {2 * cached}\n")
            (tmp_path / "memory.max").write_text(f"{limit}\n")
            (tmp_path / "memory.current").write_text(f"{used}\n")
        return available_bytes(tmp_path / "meminfo", tmp_path)

    return read


def test_available_memory_is_the_hosts_without_a_limit(system):
    assert system() == 1000 * 1024
    assert system(limit="max") == 1000 * 1024


def test_a_container_has_what_its_limit_leaves(system):
    assert system(limit="500000", used="100000") == 400_000
    assert system(limit="50000000", used="100000") == 1000 * 1024
    assert system(limit="500000", used="400000", cached=50_000) == 250_000, "files it has read are no claim"
    assert system(limit="5", used="6") == 0


def test_this_machine_has_memory():
    assert available_bytes() > 0


def test_pages_fill_the_bytes():
    assert pages_within(3 * PAGE - 1, SPEC) == 2
    assert pages_within(3 * PAGE, SPEC) == 3
    with pytest.raises(MemoryExhausted, match=f"2 pages of {PAGE} bytes"):
        pages_within(2 * PAGE - 1, SPEC)


def test_a_pool_needs_room():
    check_room(3, SPEC, 3 * PAGE)
    with pytest.raises(MemoryExhausted, match=f"3 pages takes {3 * PAGE} bytes; this host has {3 * PAGE - 1} left"):
        check_room(3, SPEC, 3 * PAGE - 1)


def test_a_pool_is_no_larger_than_its_batch_can_fill():
    assert default_pages(SPEC, max_batch=3, share_bytes=1000 * PAGE) == 1 + 3 * 4
    assert default_pages(SPEC, max_batch=3, share_bytes=5 * PAGE) == 5
