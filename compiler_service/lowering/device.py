"""Programs are traced on the CPU, where untouched weights take no memory, and then moved to where they are to run."""

from __future__ import annotations

from dataclasses import replace

from torch.export.passes import move_to_device_pass

from compiler_service.export.program import DecoderProgram


def on_device(program: DecoderProgram, device: str) -> DecoderProgram:
    """`program` for `device`, `cpu` or `cuda`; `program` itself may not be used afterwards.

    On a GPU its weights take memory, of whatever values: an engine is given the model's. `constants` stay on the host: they
    go into a file.
    """
    if device == "cpu":
        return program
    return replace(program, program=move_to_device_pass(program.program, device))
