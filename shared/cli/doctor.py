"""`quire doctor`: what this machine can build and run, and what is missing for the rest."""

from __future__ import annotations

import grpc
import typer

from shared.cli.options import word_of
from shared.cli.session import session_of
from shared.errors import Unavailable
from shared.pb.quire.v1 import common_pb2, compiler_pb2, control_pb2
from shared.rpc.status import from_rpc_error


def doctor_command(context: typer.Context) -> None:
    """Ask both services what they can do; a service that does not answer is reported, not hidden."""
    session = session_of(context)
    report: dict[str, object] = {}
    rows: list[tuple[object, ...]] = []
    try:
        with session.compiler() as stub:
            build = stub.GetBuildCapabilities(compiler_pb2.GetBuildCapabilitiesRequest(), timeout=30)
        report["compiler"] = _build_report(build, rows)
    except grpc.RpcError as error:
        report["compiler"] = {"error": _reachable(error, session.compiler_address, rows, "compiler")}
    try:
        with session.control() as stub:
            info = stub.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=30)
        device = info.device
        report["runtime"] = {
            "device": device.kind,
            "name": device.name,
            "isa": list(device.isa),
            "toolchain": dict(device.toolchain),
        }
        capability = device.compute_capability or " ".join(device.isa)
        rows.append(("run", device.kind, "yes", f"{device.name} {capability}"))
    except grpc.RpcError as error:
        report["runtime"] = {"error": _reachable(error, session.runtime_address, rows, "runtime")}
    if session.as_json:
        session.print_json(report)
    else:
        session.print_table(("verb", "what", "available", "detail"), rows)


def _build_report(build: compiler_pb2.GetBuildCapabilitiesResponse, rows: list[tuple[object, ...]]) -> dict[str, object]:
    backends = {}
    for entry in build.backends:
        name = word_of(common_pb2.Backend, "BACKEND", entry.backend)
        toolchain = " ".join(f"{k} {v}" for k, v in sorted(entry.toolchain.items()))
        rows.append(("build", name, "yes" if entry.available else "no", toolchain if entry.available else entry.reason))
        backends[name] = {"available": entry.available, "reason": entry.reason, "toolchain": dict(entry.toolchain)}
    rows.append(("build", "host", "", f"{build.cpu_count} cpus, {build.memory_bytes / 2**30:.1f} GiB, {' '.join(build.isa)}"))
    return {"backends": backends, "cpu_count": build.cpu_count, "memory_bytes": build.memory_bytes, "isa": list(build.isa)}


def _reachable(error: grpc.RpcError, address: str, rows: list[tuple[object, ...]], service: str) -> str:
    known = from_rpc_error(error)
    if not isinstance(known, Unavailable):
        raise error
    rows.append(("reach", service, "no", f"nothing answers at {address}; start it with `quire up`"))
    return f"nothing answers at {address}"
