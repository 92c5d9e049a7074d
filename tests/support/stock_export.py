"""`transformers`' own static-cache step, exported the way its users do: nothing of this repository's attention or caches in it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache, StaticLayer

from tests.support.hf_cache import cache_name


class StockStep(nn.Module):
    """`model` over its stock static cache, whose tensors are the buffers `key_cache_{i}` and `value_cache_{i}`.

    The shapes of the caches are those the model makes them of when it runs. Window layers are full-length static layers: the
    mask keeps the window.
    """

    def __init__(self, model: PreTrainedModel, max_len: int) -> None:
        super().__init__()
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=max_len)
        self.cache.layers = [StaticLayer(max_len) for _ in self.cache.layers]
        self.cached = {cache_name(model.forward): self.cache}
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64), **self.cached, use_cache=True)
        self.num_caches = 0
        for layer in self.cache.layers:
            if layer.is_initialized:
                self.register_buffer(f"key_cache_{self.num_caches}", torch.zeros_like(layer.keys))
                self.register_buffer(f"value_cache_{self.num_caches}", torch.zeros_like(layer.values))
                self.num_caches += 1

    def forward(self, input_ids: Tensor, start: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits `[1, n, vocab]` of the tokens written from cell `start` on."""
        given = {} if position_ids is None else {"position_ids": position_ids}
        for index, layer in enumerate(layer for layer in self.cache.layers if layer.is_initialized):
            layer.keys, layer.values = getattr(self, f"key_cache_{index}"), getattr(self, f"value_cache_{index}")
            layer.cumulative_length = start.clone()
        logits: Tensor = self.model(input_ids=input_ids, **self.cached, use_cache=True, **given).logits
        return logits


def export_stock(model: PreTrainedModel, max_len: int, longest: int, *, positions: bool = False) -> ExportedProgram:
    """The step with a query length of 1 to `longest`, batch 1. With `positions` they are an input, otherwise the cells written."""
    ids, length = torch.zeros(1, min(5, longest), dtype=torch.int64), {1: Dim("length", min=1, max=longest)}
    inputs, shapes = (ids, torch.tensor(3)), (length, None)
    step = StockStep(model, max_len)
    if not positions:
        return export(step, inputs, dynamic_shapes=shapes, strict=False)
    return export(step, (*inputs, ids.clone()), dynamic_shapes=(*shapes, length), strict=False)
