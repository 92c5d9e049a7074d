"""Many pages of one pool copied at once, layer by layer: what a compaction round does before it writes to pages that others read.

The first round of a sequence may copy all it holds; page by page that would be a launch for each page of each layer. Nothing here
waits for a device or allocates on it: indices and the bytes on their way go through buffers made beforehand, in stream order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from runtime_service.kv.pool import KVPool
from shared.ids import PageId
from shared.kernels.upload import upload_into

_STAGING_BYTES = 8 << 20


class PageCopies:
    """Bound to `pool`; copies as many pages at a time as 8 MiB hold of the widest layer's, one at least."""

    def __init__(self, pool: KVPool) -> None:
        self._layers = [pool.by_page(layer) for layer in range(pool.spec.num_layers)]
        page_bytes = [pages[0].numel() * pages.itemsize for pages in self._layers]
        self._most = max(1, _STAGING_BYTES // max(page_bytes))
        self._index = torch.empty(2 * self._most, dtype=torch.int64, device=pool.device)
        staging = torch.empty(self._most * max(page_bytes), dtype=torch.uint8, device=pool.device)
        self._staged = [
            staging[: self._most * size].view(pages.dtype).view(self._most, *pages.shape[1:])
            for pages, size in zip(self._layers, page_bytes, strict=True)
        ]

    def run(self, copies: Sequence[tuple[PageId, PageId]]) -> None:
        """Copy the bytes of (source, target) pages in every layer. No target is a source, or twice a target."""
        for first in range(0, len(copies), self._most):
            chunk = np.asarray(copies[first : first + self._most], dtype=np.int64)
            count = len(chunk)
            upload_into(self._index[: 2 * count], torch.from_numpy(chunk.T.reshape(-1)))
            sources, targets = self._index[:count], self._index[count : 2 * count]
            for pages, staged in zip(self._layers, self._staged, strict=True):
                torch.index_select(pages, 0, sources, out=staged[:count])
                pages.index_copy_(0, targets, staged[:count])
