"""What every command shares: where the services are, and how to print."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from shared.errors import Unavailable
from shared.pb.quire.v1 import compiler_pb2_grpc, control_pb2_grpc, inference_pb2_grpc
from shared.rpc.channel import ChannelOptions, connect
from shared.rpc.status import from_rpc_error

COMPILER_ADDRESS = "127.0.0.1:50061"
RUNTIME_ADDRESS = "127.0.0.1:50062"


class Output(StrEnum):
    TEXT = "text"
    JSON = "json"


@dataclass(slots=True)
class Session:
    """Options given before the command. Progress goes to standard error, results to standard output."""

    output: Output
    compiler_address: str
    runtime_address: str
    ca: Path | None
    certificate: Path | None
    key: Path | None
    token: str | None
    console: Console = field(default_factory=lambda: Console(markup=False, highlight=False, emoji=False))
    progress: Console = field(default_factory=lambda: Console(stderr=True, markup=False, highlight=False, emoji=False))

    @property
    def as_json(self) -> bool:
        return self.output is Output.JSON

    @property
    def shows_progress(self) -> bool:
        """Bars and live lines only where a person looks at them."""
        return self.progress.is_terminal and not self.as_json

    @contextlib.contextmanager
    def _reach(self, service: str, address: str) -> Iterator[grpc.Channel]:
        """A channel whose failed calls are raised as errors of ours; one that nobody answers says where it went and what to do."""
        with connect(ChannelOptions(address, self.ca, self.certificate, self.key, self.token)) as channel:
            try:
                yield channel
            except grpc.RpcError as error:
                known = from_rpc_error(error)
                if type(known) is not Unavailable:
                    raise known from error
                cause = known.message.removeprefix("failed to connect to all addresses; last error: ")
                raise Unavailable(
                    f"no answer from the {service} at {address}: start it with `quire up`, "
                    f"or name another address by --{service}-address or QUIRE_{service.upper()}_ADDRESS ({cause})"
                ) from error

    @contextlib.contextmanager
    def compiler(self) -> Iterator[compiler_pb2_grpc.CompilerStub]:
        with self._reach("compiler", self.compiler_address) as channel:
            yield compiler_pb2_grpc.CompilerStub(channel)

    @contextlib.contextmanager
    def control(self) -> Iterator[control_pb2_grpc.ControlStub]:
        with self._reach("runtime", self.runtime_address) as channel:
            yield control_pb2_grpc.ControlStub(channel)

    @contextlib.contextmanager
    def inference(self) -> Iterator[inference_pb2_grpc.InferenceStub]:
        with self._reach("runtime", self.runtime_address) as channel:
            yield inference_pb2_grpc.InferenceStub(channel)

    def print_json(self, value: Message | dict[str, Any]) -> None:
        """One JSON object on one line; fields keep their proto names, unset ones are written too."""
        sys.stdout.write(json.dumps(to_dict(value), ensure_ascii=False) + "\n")
        sys.stdout.flush()

    def print(self, text: str) -> None:
        """A result, on one line however long it is."""
        self.console.print(text, soft_wrap=True)

    def note(self, text: str) -> None:
        """What is said beside the result."""
        self.progress.print(text, soft_wrap=True)

    def print_table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """One line a row, never cut or folded: an id can be copied from a narrow terminal and a pipe alike."""
        lines = [tuple(columns), *(tuple(" ".join(str(cell).splitlines()) for cell in row) for row in rows)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        for number, line in enumerate(lines):
            padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
            self.console.print(Text("  ".join(padded).rstrip(), style="" if number else "bold"), soft_wrap=True)


def to_dict(value: Message | dict[str, Any]) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    return MessageToDict(value, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def session_of(context: typer.Context) -> Session:
    session = context.obj
    assert isinstance(session, Session)
    return session
