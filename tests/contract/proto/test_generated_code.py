"""shared/pb is what proto/ generates, and the protos pass buf."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_committed_code_is_what_the_protos_generate(tmp_path):
    protos = sorted(p.relative_to(ROOT / "proto").as_posix() for p in (ROOT / "proto").rglob("*.proto"))
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I",
        ".",
        f"--python_out={tmp_path}",
        f"--grpc_python_out={tmp_path}",
        *protos,
    ]
    subprocess.run(command, cwd=ROOT / "proto", check=True)
    generated = sorted(tmp_path.rglob("*_pb2*.py"))
    assert len(generated) == 2 * len(protos)
    for path in generated:
        fresh = re.sub(r"^(from|import) quire\.v1", r"\1 shared.pb.quire.v1", path.read_text(), flags=re.M)
        committed = ROOT / "shared/pb" / path.relative_to(tmp_path)
        assert committed.read_text() == fresh, f"{committed} is stale: run make proto"


def test_buf_lint_is_clean():
    run = subprocess.run([Path(sys.executable).parent / "buf", "lint"], cwd=ROOT / "proto", capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
