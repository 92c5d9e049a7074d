"""The data directory of `quire up`, and the processes it starts."""

import asyncio

import pytest

from shared.cli import up
from shared.errors import Conflict, FieldOutOfRange, Unavailable


def test_a_data_directory_has_one_owner_at_a_time(tmp_path):
    with up.held(tmp_path / "new"), pytest.raises(Conflict, match="another `quire up`"), up.held(tmp_path / "new"):
        pass
    with up.held(tmp_path / "new"):
        pass


def test_a_data_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FieldOutOfRange, match="--data must be a directory"), up.held(tmp_path / "file" / "data"):
        pass


def test_a_service_that_fails_to_start_ends_the_other(tmp_path, monkeypatch):
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(60)\n")
    modules = {"compiler_service": "no_such_module", "runtime_service": "sleeper"}
    started = []
    start = up.ServiceProcess.start.__func__

    async def recorded(cls, name, module, environment):
        service = await start(cls, name, modules[module], environment | {"PYTHONPATH": str(tmp_path)})
        started.append(service)
        return service

    monkeypatch.setattr(up.ServiceProcess, "start", classmethod(recorded))
    with pytest.raises(Unavailable, match="compiler service ended with exit code 1"):
        asyncio.run(up._serve({}, {}, tmp_path))
    assert [service.process.returncode is not None for service in started] == [True, True]
