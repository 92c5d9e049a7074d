"""A TCP relay whose connections can be torn or go silent: to the server its clients are gone, without a word."""

from __future__ import annotations

import asyncio
import contextlib


class Relay:
    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._pipes: set[asyncio.StreamWriter] = set()
        self._passing = asyncio.Event()
        self._passing.set()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.tear()
        self._server.close()
        await self._server.wait_closed()

    def tear(self) -> None:
        """Reset every connection there is."""
        for pipe in self._pipes:
            pipe.transport.abort()
        self._passing.set()

    def freeze(self) -> None:
        """Pass nothing on any more, and keep every connection: a peer whose host has lost its power."""
        self._passing.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self._target)
        self._pipes |= {writer, up_writer}
        await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))
        self._pipes -= {writer, up_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
