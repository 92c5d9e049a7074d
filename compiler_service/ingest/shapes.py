"""The tensors a config promises, and whether a source has exactly those."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from shared.errors import SourceInvalid

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_SHOWN = 8


def expected_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every weight of the model, tied weights once (under the embedding's name)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes[HEAD]
    return shapes


def check_layer_count(config: PreTrainedConfig, layers: set[int]) -> None:
    """SourceInvalid unless the weights have exactly the config's layers. Cheap, so it comes before anything is built."""
    if layers != set(range(config.num_hidden_layers)):
        found = f"{len(layers)} layers, {min(layers)} to {max(layers)}" if layers else "no layers"
        raise SourceInvalid(
            f"config and weights disagree: num_hidden_layers is {config.num_hidden_layers}, the weights hold {found}"
        )


def check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """SourceInvalid, naming tensors and both shapes, unless `found` has exactly the tensors of `expected`."""
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [
        f"{name} should be {list(shape)} and is {list(found[name])}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems += [f"{name[:120]} is not a tensor of this model" for name in sorted(found.keys() - expected.keys())]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise SourceInvalid(f"config and weights disagree: {'; '.join(problems[:_SHOWN])}{more}")
