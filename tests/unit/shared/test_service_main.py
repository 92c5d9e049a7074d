"""What is wrong with a service's settings is told by variable, on one line, and ends it with an exit code of its own."""

import pytest

from compiler_service.config import CompilerSettings
from runtime_service.config import RuntimeSettings
from shared.errors import Conflict, FieldOutOfRange
from shared.service_main import BAD_INPUT, FAILED, read_settings, run_service


@pytest.mark.parametrize(
    ("settings", "variables", "told"),
    [
        (
            CompilerSettings,
            {"QUIRE_COMPILER_REDIS_URL": "http://x"},
            "QUIRE_COMPILER_REDIS_URL: redis_url must start with redis://",
        ),
        (RuntimeSettings, {"QUIRE_RUNTIME_MAX_PROMPT_TOKENS": "0"}, "QUIRE_RUNTIME_MAX_PROMPT_TOKENS: Input should be greater"),
        (RuntimeSettings, {"QUIRE_RUNTIME_TLS_KEY": "x"}, "tls_certificate and tls_key go together"),
        (RuntimeSettings, {"QUIRE_RUNTIME_ENGINES": "[{"}, 'value for field "engines"'),
        (RuntimeSettings, {"QUIRE_RUNTIME_ENGINES": '[{"name": "chat"}]'}, "QUIRE_RUNTIME_ENGINES.0.artifact_id: Field required"),
        (
            RuntimeSettings,
            {"QUIRE_RUNTIME_ENGINES": '[{"name": "chat", "artifact_id": "x"}]'},
            "artifact_id must be 64 lower-case hex digits; got 'x'",
        ),
    ],
)
def test_bad_settings_are_told_by_variable(monkeypatch, settings, variables, told):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FieldOutOfRange) as refusal:
        read_settings(settings)
    assert refusal.value.message.startswith("bad settings: ")
    assert told in refusal.value.message
    assert "\n" not in refusal.value.message


def test_every_fault_is_told(monkeypatch):
    monkeypatch.setenv("QUIRE_COMPILER_BUILD_SLOTS", "none")
    monkeypatch.setenv("QUIRE_COMPILER_MODEL_ROOTS", "")
    monkeypatch.setenv("QUIRE_COMPILER_EXPLAIN_TIMEOUT_S", "0")
    with pytest.raises(FieldOutOfRange, match=r"BUILD_SLOTS: .*; QUIRE_COMPILER_EXPLAIN_TIMEOUT_S: "):
        read_settings(CompilerSettings)


@pytest.mark.parametrize(("error", "code"), [(FieldOutOfRange("like this not"), BAD_INPUT), (Conflict("not now"), FAILED)])
def test_an_error_is_one_line_and_an_exit_code(monkeypatch, capsys, error, code):
    monkeypatch.setattr("shared.service_main.configure_logging", lambda name, level: None)

    async def serve(settings):
        raise error

    with pytest.raises(SystemExit) as end:
        run_service("compiler", CompilerSettings, serve)
    assert end.value.code == code
    assert capsys.readouterr().err == f"{error.message}\n"


def test_a_log_level_nobody_knows_is_bad_input(monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_COMPILER_LOG_LEVEL", "loud")
    with pytest.raises(SystemExit) as end:
        run_service("compiler", CompilerSettings, lambda _: pytest.fail("it serves"))
    assert end.value.code == BAD_INPUT
    assert "got 'loud'" in capsys.readouterr().err
