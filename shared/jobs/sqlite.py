"""The job queue in one SQLite file: nothing to install, safe for several processes of one host.

Write-ahead log, every change in one immediate transaction, synced before it is acknowledged. The file must be on a local disk:
SQLite's locks and shared memory do not work over network file systems; several hosts share a queue through Redis instead.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from shared.errors import DuplicateRequest, QueueFull, StoreUnavailable
from shared.jobs import lifecycle
from shared.jobs.job import Job, JobEvent, JobState, decode_event, decode_job, encode
from shared.jobs.lifecycle import Change
from shared.jobs.queue import QueuePolicy, Submission
from shared.jobs.stored import POLL_S, StoredQueue, readable

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 30.0

_SCHEMA = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL UNIQUE,
    revision INTEGER NOT NULL,
    state TEXT NOT NULL,
    available_s REAL NOT NULL,
    due_s REAL NOT NULL,
    joinable_digest TEXT,
    record BLOB NOT NULL
);
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX jobs_by_due ON jobs (due_s);
CREATE INDEX jobs_by_digest ON jobs (joinable_digest);
CREATE TABLE requests (request_id TEXT PRIMARY KEY, job_id TEXT NOT NULL, spec_digest TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX requests_by_job ON requests (job_id);
CREATE TABLE events (job_id TEXT, sequence INTEGER, record BLOB NOT NULL, PRIMARY KEY (job_id, sequence)) WITHOUT ROWID;
"""

_T = TypeVar("_T")


class SQLiteQueue(StoredQueue):
    """JobQueue in the file `path`, which is created. StoreUnavailable for a file of another schema or one that fails."""

    def __init__(self, path: Path, policy: QueuePolicy | None = None, clock: Callable[[], float] = time.time) -> None:
        super().__init__(policy or QueuePolicy())
        self._clock = clock
        # One thread owns the connection; the event loop never waits on the disk.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="job-queue")
        self._db = self._thread.submit(_connect, path).result()

    async def close(self) -> None:
        await self._run(self._db.close)
        self._thread.shutdown()

    async def count(self) -> Mapping[JobState, int]:
        rows = await self._run(lambda: self._db.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())
        return dict.fromkeys(JobState, 0) | {JobState(state): number for state, number in rows}

    async def _now(self) -> float:
        return self._clock()

    async def _insert(self, change: Change, *, reuse_finished: bool) -> Submission:
        return await self._run(lambda: self._insert_now(change, reuse_finished))

    def _insert_now(self, change: Change, reuse_finished: bool) -> Submission:
        job = change.job
        with self._transaction():
            found = self._known(job, reuse_finished)
            if found is None:
                (waiting,) = self._db.execute("SELECT count(*) FROM jobs WHERE state = ?", (JobState.QUEUED,)).fetchone()
                if waiting >= self._policy.max_queued:
                    raise QueueFull(f"{waiting} jobs wait already (at most {self._policy.max_queued}); try again later")
                self._db.execute(
                    "INSERT INTO jobs (job_id, revision, state, available_s, due_s, joinable_digest, record)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (job.job_id, *self._columns(job)),
                )
                self._append(change)
            self._db.execute(
                "INSERT OR REPLACE INTO requests VALUES (?, ?, ?)", (job.request_id, (found or job).job_id, job.request_digest)
            )
        return Submission(job=found or job, created=found is None)

    def _known(self, job: Job, reuse_finished: bool) -> Job | None:
        """The job that answers this request already: by request id, else by what makes it one build."""
        row = self._db.execute(
            "SELECT spec_digest, record FROM requests JOIN jobs USING (job_id) WHERE request_id = ?", (job.request_id,)
        ).fetchone()
        if row is not None:
            if row[0] != job.request_digest:
                raise DuplicateRequest(f"request {job.request_id} was made before with another spec; choose another request_id")
            earlier = decode_job(row[1])
            if reuse_finished or earlier.state is not JobState.SUCCEEDED:
                return earlier
        row = self._db.execute(
            "SELECT record FROM jobs WHERE joinable_digest = ? AND (? OR state != ?) ORDER BY number DESC LIMIT 1",
            (job.spec_digest, reuse_finished, JobState.SUCCEEDED),
        ).fetchone()
        return None if row is None else decode_job(row[0])

    async def _load(self, job_id: str) -> Job | None:
        row = await self._run(lambda: self._db.execute("SELECT record FROM jobs WHERE job_id = ?", (job_id,)).fetchone())
        return None if row is None else decode_job(row[0])

    async def _commit(self, change: Change) -> bool:
        def commit() -> bool:
            with self._transaction():
                updated = self._db.execute(
                    "UPDATE jobs SET revision = ?, state = ?, available_s = ?, due_s = ?, joinable_digest = ?, record = ?"
                    " WHERE job_id = ? AND revision = ?",
                    (*self._columns(change.job), change.job.job_id, change.job.revision - 1),
                )
                if updated.rowcount == 1:
                    self._append(change)
                return updated.rowcount == 1

        return await self._run(commit)

    async def _forget(self, job: Job) -> bool:
        def forget() -> bool:
            with self._transaction():
                gone = self._db.execute("DELETE FROM jobs WHERE job_id = ? AND revision = ?", (job.job_id, job.revision))
                if gone.rowcount == 1:
                    self._db.execute("DELETE FROM events WHERE job_id = ?", (job.job_id,))
                    self._db.execute("DELETE FROM requests WHERE job_id = ?", (job.job_id,))
                return gone.rowcount == 1

        return await self._run(forget)

    async def _take(self, worker: str, wait_s: float) -> Job | None:
        rows = await self._run(
            lambda: self._db.execute(
                "SELECT record FROM jobs WHERE state = ? AND available_s <= ? ORDER BY number LIMIT 100",
                (JobState.QUEUED, self._clock()),
            ).fetchall()
        )
        job = next(readable(record for (record,) in rows), None)
        if job is None:
            await asyncio.sleep(min(wait_s, POLL_S))
        return job

    async def _repair(self, now: float) -> None:
        """Nothing: a transaction covers everything this backend keeps."""

    async def _due(self, now: float) -> Sequence[str]:
        # What lies further ahead than any time that is set now is due as well: the host's clock was set back (lifecycle.rewound).
        query = (
            "SELECT job_id FROM jobs WHERE due_s <= :now"
            " OR state = :queued AND available_s > :now + :delay OR state IN (:running, :publishing) AND due_s > :now + :lease"
        )
        times = {"now": now, "delay": self._policy.max_retry_delay_s, "lease": self._policy.lease_s}
        states = {"queued": JobState.QUEUED, "running": JobState.RUNNING, "publishing": JobState.PUBLISHING}
        rows = await self._run(lambda: self._db.execute(query, times | states).fetchall())
        return [job_id for (job_id,) in rows]

    async def _page(self, states: Collection[JobState], before: int | None, limit: int) -> Sequence[tuple[int, bytes]]:
        wanted = [str(state) for state in states or JobState]
        query = f"SELECT number, record FROM jobs WHERE state IN ({','.join('?' * len(wanted))}) AND number < ?"  # noqa: S608 (only '?' is spliced in)
        query += " ORDER BY number DESC LIMIT ?"
        return await self._run(lambda: self._db.execute(query, (*wanted, before or 2**62, limit)).fetchall())

    async def _events(self, job_id: str, after_sequence: int) -> Sequence[JobEvent]:
        query = "SELECT record FROM events WHERE job_id = ? AND sequence > ? ORDER BY sequence"
        rows = await self._run(lambda: self._db.execute(query, (job_id, after_sequence)).fetchall())
        return [decode_event(record) for (record,) in rows]

    def _columns(self, job: Job) -> tuple[int, str, float, float, str | None, bytes]:
        digest = job.spec_digest if lifecycle.is_joinable(job) else None
        return job.revision, job.state, job.available_s, lifecycle.due_s(job, self._policy), digest, encode(job)

    def _append(self, change: Change) -> None:
        self._db.executemany(
            "INSERT INTO events VALUES (?, ?, ?)", [(change.job.job_id, event.sequence, encode(event)) for event in change.events]
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    async def _run(self, call: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"the job queue's database failed: {error}") from error


def _connect(path: Path) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
    except sqlite3.Error as error:
        raise StoreUnavailable(f"the job queue's database {path} cannot be opened: {error}") from error
    if version not in (0, SCHEMA_VERSION):
        raise StoreUnavailable(
            f"the job queue's database {path} has schema {version}, this version of Quire needs {SCHEMA_VERSION}; use another file"
        )
    return db
