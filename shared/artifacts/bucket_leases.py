"""What keeps an artifact of a bucket from being removed under who holds it, and two removals apart: objects that say until when.

<id>/leases/<name>   one a handle: Unix time at which it lapses unless renewed
<id>/removal         of whoever removes the artifact: the same
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from shared.artifacts.bucket import Bucket, Item
from shared.artifacts.lease import LEASE_TTL_S, Lease
from shared.ids import new_id


class BucketLeases:
    """StoreUnavailable where the bucket fails."""

    def __init__(self, bucket: Bucket, clock: Callable[[], float]) -> None:
        self._bucket, self._clock = bucket, clock

    def take(self, artifact_id: str) -> Lease:
        path = f"{artifact_id}/leases/{new_id()}"

        def renew() -> None:
            self._bucket.put(path, self._until())

        renew()
        return Lease(renew, lambda: self._bucket.delete([path]))

    def is_held(self, artifact_id: str) -> bool:
        return self.any_holds(self._bucket.items(f"{artifact_id}/leases"))

    def any_holds(self, items: Sequence[Item]) -> bool:
        return any(is_lease(item) and not self.is_lapsed(item.path) for item in items)

    def is_lapsed(self, path: str) -> bool:
        """So is one that is gone."""
        return read_time(self._bucket, path) < self._clock()

    @contextmanager
    def removal(self, artifact_id: str) -> Iterator[bool]:
        """Whether nobody else removes the artifact meanwhile."""
        path = removal_path(artifact_id)
        tag = self._bucket.tag(path)
        if tag is None:
            is_alone = self._bucket.create(path, self._until())
        else:
            is_alone = self.is_lapsed(path) and self._bucket.replace(path, self._until(), tag)
        if not is_alone:
            yield False
            return
        with closing(Lease(lambda: self._bucket.put(path, self._until()), lambda: self._bucket.delete([path]))):
            yield True

    def _until(self) -> bytes:
        return time_bytes(self._clock() + LEASE_TTL_S)


def is_lease(item: Item) -> bool:
    return "/leases/" in item.path


def removal_path(artifact_id: str) -> str:
    return f"{artifact_id}/removal"


def time_bytes(seconds: float) -> bytes:
    return repr(seconds).encode()


def read_time(bucket: Bucket, path: str) -> float:
    """0.0 where there is none."""
    try:
        return float(bucket.get(path) or b"0")
    except ValueError:
        return 0.0
