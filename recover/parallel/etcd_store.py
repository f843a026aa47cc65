"""Where the ranks of a replica that lies on several hosts find each other: torch's store, in the job's etcd."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recover.world.fabrics.etcd.client import EtcdClient, absent, get, put, version_is

_AGAIN = 0.01  # seconds between two looks


class EtcdStore(dist.Store):
    """For start-up, when mates exchange addresses: a few small values, read once."""

    def __init__(self, client: EtcdClient, prefix: str, patience: timedelta) -> None:
        super().__init__()
        self._client, self._prefix, self._patience = client, prefix, patience.total_seconds()

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        mark = self._new_mark()  # once only: carried out late, it would bring back an old value
        self._client.txn([absent(mark)], [put(self._prefix + key, data), put(mark, b"")])

    def get(self, key: str) -> bytes:
        self.wait([key])
        found = self._client.get(self._prefix + key)
        assert found is not None
        return found.value

    def add(self, key: str, amount: int) -> int:
        """An answer may be lost, and the question is asked again: a mark tells whether it was counted already."""
        key, mark = self._prefix + key, self._new_mark()
        while True:
            found = self._client.get(key)
            total = (int(found.value) if found else 0) + amount
            guard = version_is(key, found.version if found else 0)
            writes = [put(key, b"%d" % total), put(mark, b"")]
            answer = self._client.txn([guard, absent(mark)], writes, [get(mark)])
            if answer.succeeded or answer.found[0]:
                return total

    def _new_mark(self) -> str:
        return f"{self._prefix}done/{uuid.uuid4().hex}"

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._client.get(self._prefix + key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._patience if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no mate has set {', '.join(keys)} within {seconds:g} s")
            time.sleep(_AGAIN)

    def delete_key(self, key: str) -> bool:
        return False  # the job's keys go with the job
