"""An unpacked AOTInductor package: what can be read of it, and the only way to run it.

Running a package before its constants are loaded is a segmentation fault inside libtorch, so nothing here can: opening gives a
`Package` without a call, and binding constants to it gives the `BoundPackage` that has one.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.errors import ArtifactCorrupt, EngineIncompatible
from shared.inductor.toolchain import load_ops

_MODEL_NAME = "model"
_PAGED_ATTEND = "quire::paged_attend"
_CALLER_PREFIX = "arg"
"""Generated code calls the tensors of its caller `arg0_1`, ...; what it allocates itself is `buf0`, ..."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """One call of `quire::paged_attend` in the generated code."""

    pool: str
    page_dim: int
    window: int | None

    @property
    def in_place(self) -> bool:
        """Whether the call is handed the caller's own tensor rather than a copy of it."""
        return self.pool.startswith(_CALLER_PREFIX)


class Package:
    """A package opened from its directory. Its library is mapped and its facts are known; it cannot run.

    `device` is what it was built for, `cpu` or `cuda`. ArtifactCorrupt when the directory holds no readable package. Opening
    maps native code: check the host first.
    """

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        load_ops()
        try:
            self._loader: Any = _open(directory, single_threaded=device != "cpu")
        except RuntimeError as error:
            raise ArtifactCorrupt(f"{directory} should hold an unpacked AOTInductor package; {error}") from error
        self.cpu_isa: str = self._loader.get_metadata()["AOTI_CPU_ISA"]
        self.constants = frozenset(self._loader.get_constant_fqns())
        self.pool_uses = tuple(_pool_uses(directory))
        self.num_inputs = _num_inputs(self._loader.get_call_spec()[0])

    def bind(self, constants: Mapping[str, Tensor]) -> BoundPackage:
        """The package reading its constants from these very tensors: nothing is copied, the result keeps them alive.

        EngineIncompatible unless exactly the constants of the package are given.
        """
        if self.constants != constants.keys():
            missing, unknown = sorted(self.constants - constants.keys()), sorted(constants.keys() - self.constants)
            raise EngineIncompatible(
                f"the engine wants {len(self.constants)} constants; missing {missing[:3]}, not known to it {unknown[:3]}",
                details={"field": "constants", "expected": str(len(self.constants)), "got": str(len(constants))},
            )
        held = dict(constants)
        # check_full_update, user_managed: every constant is set, and stays the caller's memory.
        self._loader.load_constants(held, False, True, True)
        return BoundPackage(self._loader, held)


class BoundPackage:
    """A package that can run. Inputs are not checked here: a value out of range ends the process, not the call."""

    def __init__(self, loader: Any, constants: Mapping[str, Tensor]) -> None:
        self._loader = loader
        self._constants = constants

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """The program's one output. Inputs in the program's order, contiguous."""
        (output,) = self._loader.boxed_run(list(inputs))
        assert isinstance(output, Tensor)
        return output


def _open(directory: Path, *, single_threaded: bool) -> Any:
    """`single_threaded` leaves out the events that torch otherwise records around a run, which no CUDA graph may contain."""
    # Some toolchains link libstdc++ statically into a package. Its code must use the process's copy all the same: two halves of one
    # std::locale end in a segmentation fault.
    ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)
    arguments = (_MODEL_NAME, single_threaded, 1, -1)
    if torch.torch_version.TorchVersion(torch.__version__) >= "2.13":
        return torch._C._aoti.AOTIModelPackageLoader(str(directory), *arguments)
    # Older releases open archives alone, and unpack them for themselves.
    with tempfile.NamedTemporaryFile(suffix=".pt2") as packed:
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(path for path in directory.rglob("*") if path.is_file()):
                archive.write(path, Path("engine") / path.relative_to(directory))
        packed.flush()
        return torch._C._aoti.AOTIModelPackageLoader(packed.name, *arguments)


def _pool_uses(directory: Path) -> Iterator[PoolUse]:
    """Calls of our op in the order the generated code makes them, read from the package's list of external calls."""
    for path in sorted(directory.rglob("*.wrapper.json")):
        for entry in json.loads(path.read_text())["nodes"]:
            if entry["node"]["target"] == _PAGED_ATTEND:
                arguments = {given["name"]: given["arg"] for given in entry["node"]["inputs"]}
                yield PoolUse(
                    pool=arguments["pool"]["as_tensor"]["name"],
                    page_dim=arguments["page_dim"]["as_int"],
                    window=arguments["window"].get("as_int"),
                )


def _num_inputs(call_spec: str) -> int:
    """Positional inputs in a serialised pytree spec: the leaves of `((input, ...), {})`."""
    _version, spec = json.loads(call_spec)
    positional, _keywords = spec["children_spec"]
    return len(positional["children_spec"])
