"""Plans that hold nothing but attention, one for each form of it, with inputs and what the specification says of them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from compiler_service.backends.tensorrt.host import without_gpu
from shared.kernels.attention import reference

FORMS: dict[str, tuple[int | None, float | None, bool]] = {
    "plain": (None, None, False),
    "window": (5, None, False),
    "softcap": (None, 3.0, False),
    "sinks": (None, None, True),
    "all": (5, 3.0, True),
}
"""name -> (window, softcap, sinks)"""
SCALE, Q_HEADS, KV_HEADS, CELLS, DIM = 0.3, 6, 2, 40, 16


def write_attention_plans(directory: Path) -> None:
    """Batch and query length are dynamic; float32."""
    directory.mkdir(parents=True, exist_ok=True)
    with without_gpu():
        import tensorrt as trt
        import torch_tensorrt  # noqa: F401 - makes `tensorrt` importable

        from compiler_service.backends.tensorrt.attention import Masks, attend
        from compiler_service.backends.tensorrt.layers import Layers
        from compiler_service.backends.tensorrt.plan import Builder

        for name, (window, softcap, with_sinks) in FORMS.items():
            builder = Builder()
            network = builder.network
            q = network.add_input("q", trt.float32, (-1, Q_HEADS, -1, DIM))
            k, v = (network.add_input(kind, trt.float32, (-1, KV_HEADS, CELLS, DIM)) for kind in "kv")
            start, tokens = network.add_input("start", trt.int32, (-1,)), network.add_input("tokens", trt.int32, (-1, -1))
            sinks = network.add_input("sinks", trt.float32, (Q_HEADS,)) if with_sinks else None
            layers = Layers(network, [], name)
            masks = Masks(layers, tokens, start, CELLS)
            out = attend(layers, masks, q, k, v, (Q_HEADS, KV_HEADS), SCALE, window, softcap, sinks)
            out.name = "out"
            network.mark_output(out)
            shapes = {
                "q": ((1, Q_HEADS, 1, DIM), (2, Q_HEADS, 4, DIM), (4, Q_HEADS, 8, DIM)),
                "k": ((1, KV_HEADS, CELLS, DIM), (2, KV_HEADS, CELLS, DIM), (4, KV_HEADS, CELLS, DIM)),
                "v": ((1, KV_HEADS, CELLS, DIM), (2, KV_HEADS, CELLS, DIM), (4, KV_HEADS, CELLS, DIM)),
                "start": ((1,), (2,), (4,)),
                "tokens": ((1, 1), (2, 4), (4, 8)),
            }
            (directory / f"{name}.plan").write_bytes(builder.build([shapes], ("sm80",), lambda *_: None))
            save_file(_case(window, softcap, with_sinks), directory / f"{name}.safetensors")


def _case(window: int | None, softcap: float | None, with_sinks: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    batch, count = 3, 7

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    case = {
        "q": noise(batch, Q_HEADS, count, DIM),
        "k": noise(batch, KV_HEADS, CELLS, DIM),
        "v": noise(batch, KV_HEADS, CELLS, DIM),
        "start": torch.tensor([0, 11, CELLS - count], dtype=torch.int32),
        "tokens": torch.zeros(batch, count, dtype=torch.int32),
    }
    sinks = noise(Q_HEADS) if with_sinks else None
    out = reference.attend(case["q"], case["k"], case["v"], case["start"], SCALE, window, softcap, sinks)
    return {**case, **({} if sinks is None else {"sinks": sinks}), "out": out.contiguous()}
