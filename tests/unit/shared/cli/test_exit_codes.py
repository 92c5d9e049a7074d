"""Scripts can tell classes of errors apart by the exit code."""

import json
import subprocess
import sys

import pytest

from shared import errors
from shared.cli.exit_codes import EXIT_CODES, INTERNAL, exit_code


def every_class(kind):
    return [kind, *(c for child in kind.__subclasses__() for c in every_class(child))]


@pytest.mark.parametrize("kind", every_class(errors.QuireError)[1:], ids=lambda k: k.__name__)
def test_every_class_has_a_code_of_its_own_branch(kind):
    branch = next(c for c in kind.__mro__ if c in EXIT_CODES)
    assert exit_code(kind("x")) == EXIT_CODES[branch]
    assert (exit_code(kind("x")) == INTERNAL) == issubclass(kind, errors.InternalError)


def quire(*words):
    return subprocess.run([sys.executable, "-m", "shared.cli.main", *words], capture_output=True, text=True, timeout=60)


def test_an_unreachable_service_is_one_line_and_exit_code_7():
    run = quire("--compiler-address", "127.0.0.1:1", "jobs", "ls")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (7, "", 1)
    assert run.stderr.startswith("quire: UNAVAILABLE: no answer from the compiler at 127.0.0.1:1: start it with `quire up`")


def test_doctor_reports_every_service_that_is_away_and_exits_7():
    run = quire("--compiler-address", "127.0.0.1:1", "--runtime-address", "127.0.0.1:2", "doctor")
    assert run.returncode == 7
    assert [line.split()[:3] for line in run.stdout.splitlines()[1:]] == [["reach", "compiler", "no"], ["reach", "runtime", "no"]]


def test_errors_are_json_where_json_was_asked_for():
    run = quire("compile", "m", "--layout", "ring", "--output", "json")
    assert run.returncode == 2
    assert json.loads(run.stderr)["error"]["field"] == "--layout"
