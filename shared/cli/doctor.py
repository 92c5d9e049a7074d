"""`quire doctor`: what this machine can build and run, and what is missing for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import typer

from shared.cli.exit_codes import exit_code
from shared.cli.options import word_of
from shared.cli.session import session_of
from shared.errors import QuireError, Unavailable
from shared.pb.quire.v1 import common_pb2, compiler_pb2, control_pb2

_VECTOR_FEATURES = ("avx", "fma", "f16c", "amx", "asimd", "sve", "bf16")


def doctor_command(context: typer.Context) -> None:
    """Ask both services what they can do; one that does not answer is a line of the report, and exit code 7."""
    session = session_of(context)
    report: dict[str, object] = {}
    rows: list[tuple[object, ...]] = []
    away: QuireError | None = None
    try:
        with session.compiler() as stub:
            build = stub.GetBuildCapabilities(compiler_pb2.GetBuildCapabilitiesRequest(), timeout=30)
        report["compiler"] = _build_report(build, rows)
    except Unavailable as error:
        away, report["compiler"] = error, {"error": error.message}
        rows.append(("reach", "compiler", "no", error.message))
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
        capability = f"compute capability {device.compute_capability}" if device.compute_capability else _vectors(device.isa)
        rows.append(("run", device.kind, "yes", ", ".join(filter(None, (device.name, capability, _versions(device.toolchain))))))
    except Unavailable as error:
        away, report["runtime"] = error, {"error": error.message}
        rows.append(("reach", "runtime", "no", error.message))
    if session.as_json:
        session.print_json(report)
    else:
        session.print_table(("verb", "what", "available", "detail"), rows)
    if away is not None:
        raise typer.Exit(exit_code(away))


def _build_report(build: compiler_pb2.GetBuildCapabilitiesResponse, rows: list[tuple[object, ...]]) -> dict[str, object]:
    backends = {}
    for entry in build.backends:
        name = word_of(common_pb2.Backend, "BACKEND", entry.backend)
        detail = _versions(entry.toolchain) if entry.available else entry.reason
        rows.append(("build", name, "yes" if entry.available else "no", detail))
        backends[name] = {"available": entry.available, "reason": entry.reason, "toolchain": dict(entry.toolchain)}
    rows.append(("build", "host", "", f"{build.cpu_count} cpus, {build.memory_bytes / 2**30:.1f} GiB, {' '.join(build.isa)}"))
    return {"backends": backends, "cpu_count": build.cpu_count, "memory_bytes": build.memory_bytes, "isa": list(build.isa)}


def _versions(toolchain: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(toolchain.items()))


def _vectors(isa: Iterable[str]) -> str:
    """What matters of a CPU's many features."""
    return " ".join(sorted(feature for feature in isa if feature.startswith(_VECTOR_FEATURES)))
