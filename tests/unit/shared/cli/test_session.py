"""What commands print, and where they look for the services."""

from pathlib import Path

import pytest

from shared.cli.session import Output, Session
from shared.errors import FieldOutOfRange


def session(**changes):
    given = {"output": Output.TEXT, "compiler_address": "127.0.0.1:1", "runtime_address": "127.0.0.1:2"}
    return Session(**(given | dict.fromkeys(("ca", "certificate", "key", "token")) | changes))


def test_rows_are_never_folded_and_brackets_are_no_markup(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    session().print_table(("name", "detail"), [("a", "pip install 'quire[tensorrt]' " + "x" * 200), ("\u6f22\u5b57", "two\nlines")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "name  detail",
        "a     pip install 'quire[tensorrt]' " + "x" * 200,
        "\u6f22\u5b57  two lines",
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ca": Path("/nowhere.pem")}, "--ca"),
        ({"ca": Path(__file__), "key": Path(__file__)}, "--certificate"),
        ({"token": "t", "compiler_address": "10.0.0.1:5"}, "--token"),
    ],
)
def test_bad_credentials_are_named(changes, named):
    with pytest.raises(FieldOutOfRange) as refused, session(**changes).compiler():
        pass
    assert refused.value.field == named
