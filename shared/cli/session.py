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
from rich.console import Console
from rich.table import Table

from shared.pb.quire.v1 import compiler_pb2_grpc, control_pb2_grpc, inference_pb2_grpc
from shared.rpc.channel import ChannelOptions, connect

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
    console: Console = field(default_factory=Console)
    progress: Console = field(default_factory=lambda: Console(stderr=True))

    @property
    def as_json(self) -> bool:
        return self.output is Output.JSON

    @property
    def shows_progress(self) -> bool:
        """Bars and live lines only where a person looks at them."""
        return self.progress.is_terminal and not self.as_json

    def _connect(self, address: str) -> grpc.Channel:
        return connect(ChannelOptions(address, self.ca, self.certificate, self.key, self.token))

    @contextlib.contextmanager
    def compiler(self) -> Iterator[compiler_pb2_grpc.CompilerStub]:
        with self._connect(self.compiler_address) as channel:
            yield compiler_pb2_grpc.CompilerStub(channel)

    @contextlib.contextmanager
    def control(self) -> Iterator[control_pb2_grpc.ControlStub]:
        with self._connect(self.runtime_address) as channel:
            yield control_pb2_grpc.ControlStub(channel)

    @contextlib.contextmanager
    def inference(self) -> Iterator[inference_pb2_grpc.InferenceStub]:
        with self._connect(self.runtime_address) as channel:
            yield inference_pb2_grpc.InferenceStub(channel)

    def print_json(self, value: Message | dict[str, Any]) -> None:
        """One JSON object on one line; fields keep their proto names, unset ones are written too."""
        sys.stdout.write(json.dumps(to_dict(value), ensure_ascii=False) + "\n")
        sys.stdout.flush()

    def print_table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*("" if cell is None else str(cell) for cell in row))
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, 240)
        self.console.print(table)

    def print_fields(self, message: Message | dict[str, Any]) -> None:
        """A message as `name value` lines, nested ones as JSON."""
        rows = [
            (name, value if not isinstance(value, dict | list) else json.dumps(value)) for name, value in to_dict(message).items()
        ]
        self.print_table(("field", "value"), rows)


def to_dict(value: Message | dict[str, Any]) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    return MessageToDict(value, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def session_of(context: typer.Context) -> Session:
    session = context.obj
    assert isinstance(session, Session)
    return session
