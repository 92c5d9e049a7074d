"""The lint that keeps pickle out of the services notices it, however it is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def found_in(code: str) -> set[str]:
    """Rules that ruff, as this repository sets it up, finds broken in `code` of a service."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--output-format",
        "json",
        "--stdin-filename",
        "compiler_service/sample.py",
        "-",
    ]
    answer = subprocess.run(command, input=code, capture_output=True, text=True, cwd=ROOT, check=False)
    return {finding["code"] for finding in json.loads(answer.stdout)}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle\n\n\ndef read(data: bytes) -> object:\n    return pickle.loads(data)\n",
        "from pickle import loads\n\n\ndef read(data: bytes) -> object:\n    return loads(data)\n",
        "import torch\n\n\ndef read(path: str) -> object:\n    return torch.load(path)\n",
        "from torch import load\n\n\ndef read(path: str) -> object:\n    return load(path)\n",
        "import torch\n\n\ndef read(path: str) -> object:\n    return torch.load(path, weights_only=True)\n",
        "import torch as t\n\n\ndef read(path: str) -> object:\n    return t.export.load(path)\n",
        "from torch.jit import load as read\n\n__all__ = ['read']\n",
        "import numpy as np\n\n\ndef read(path: str) -> object:\n    return np.load(path, allow_pickle=True)\n",
        "import shelve\n\n\ndef read(path: str) -> object:\n    return shelve.open(path)\n",
        "from torch.hub import load\n\n__all__ = ['load']\n",
    ],
)
def test_a_way_to_unpickle_is_found(code):
    assert "TID251" in found_in(code)


def test_marshal_and_exec_are_found():
    code = "import marshal\n\n\ndef run(data: bytes) -> None:\n    exec(marshal.loads(data))\n"
    assert {"S302", "S102"} <= found_in(code)


def test_sound_code_is_not():
    code = '"""Reads."""\n\nfrom safetensors.torch import load\n\n\ndef read(data: bytes) -> object:\n    return load(data)\n'
    assert found_in(code) == set()
