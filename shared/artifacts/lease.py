"""A claim on an artifact that outlives no process: renewed by a heartbeat, it lapses by itself when the holder dies."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from shared.errors import StoreUnavailable

LEASE_TTL_S = 60.0
"""A lease not renewed for this long no longer protects. A holder suspended that long keeps its open files, not the artifact."""

_log = structlog.get_logger(__name__)


class Lease:
    """Renews every third of `ttl_s` on a daemon thread until closed.

    `renew` and `release` may raise OSError or StoreUnavailable: a renewal is tried again at the next beat, a failed release is
    left to lapse.
    """

    def __init__(self, renew: Callable[[], None], release: Callable[[], None], ttl_s: float = LEASE_TTL_S) -> None:
        self._renew, self._release = renew, release
        self._interval_s = ttl_s / 3
        self._closed = threading.Event()
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="artifact-lease", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self._renew()
            except (OSError, StoreUnavailable) as error:
                _log.warning("artifact lease not renewed", error=str(error))

    def close(self) -> None:
        """Stop renewing, then release. Idempotent and safe from any thread."""
        with self._closing:
            if self._closed.is_set():
                return
            self._closed.set()
            self._thread.join()
            try:
                self._release()
            except (OSError, StoreUnavailable) as error:
                _log.warning("artifact lease not released; it lapses by itself", error=str(error))
