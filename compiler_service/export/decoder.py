"""One decoding step as a module: tokens in, logits of one token a row out, caches as buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from compiler_service.export.attention import ATTENTION, StepCaches, register_attention
from shared.bindings import cache_name
from shared.kv_spec import DType, KVCacheSpec


def weightless_decoder(config: PreTrainedConfig, dtype: DType) -> PreTrainedModel:
    """The model of `config` with every buffer computed and every parameter allocated but never touched.

    Exporting reads shapes, not values, so no weight takes memory before an engine runs.
    """
    register_attention()
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype.value), attn_implementation=ATTENTION)
    model.tie_weights()
    return model.eval().requires_grad_(False)


class DecoderStep(nn.Module):
    """A causal LM over caches that are its buffers `k_cache.{i}` and `v_cache.{i}`, `[batch, kv_heads, max_len, head_dim]`.

    The model must have been built with the attention of this package. The buffers are declared empty: whoever calls the module
    puts caches of the batch and length at hand into them.
    """

    def __init__(self, model: PreTrainedModel, spec: KVCacheSpec) -> None:
        super().__init__()
        self.model = model
        self.spec = spec
        self.k_cache = _declared_buffers(spec.num_layers)
        self.v_cache = _declared_buffers(spec.num_layers)

    def forward(self, input_ids: Tensor, position_ids: Tensor, write_start: Tensor, last_index: Tensor) -> Tensor:
        """Inputs and the returned logits as described in shared/bindings.py."""
        batch, query_len = input_ids.shape
        step = StepCaches(_tensors(self.k_cache), _tensors(self.v_cache), write_start, query_len, self.spec)
        hidden = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, step=step).last_hidden_state
        last = hidden[torch.arange(batch, device=hidden.device), last_index]
        logits: Tensor = self.model.lm_head(last).float()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)


class LiftedStep(nn.Module):
    """A DecoderStep whose caches come from the caller, so that their batch and length may differ from call to call."""

    def __init__(self, step: DecoderStep) -> None:
        super().__init__()
        self.step = step

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        write_start: Tensor,
        last_index: Tensor,
        k_cache: list[Tensor],
        v_cache: list[Tensor],
    ) -> Tensor:
        caches = {cache_name(i, "k"): k for i, k in enumerate(k_cache)} | {cache_name(i, "v"): v for i, v in enumerate(v_cache)}
        logits: Tensor = functional_call(self.step, caches, (input_ids, position_ids, write_start, last_index))
        return logits


def _declared_buffers(count: int) -> nn.Module:
    """A module with `count` empty buffers `0`, `1`, ..., which read `k_cache.0` from outside."""
    module = nn.Module()
    for index in range(count):
        module.register_buffer(str(index), None, persistent=False)
    return module


def _tensors(module: nn.Module) -> list[Tensor]:
    return [buffer for _, buffer in module.named_buffers(remove_duplicate=False)]
