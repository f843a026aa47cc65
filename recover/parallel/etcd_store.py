"""Torch's rendezvous store in the job's etcd, for a replica that spans several hosts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recover.world.fabrics.etcd.client import EtcdClient, absent, get, put, version_is

_AGAIN = 0.01  # seconds between two reads


class EtcdStore(dist.Store):
    """A store for start-up, when the ranks of a replica exchange addresses: a few small values, read
    once."""

    def __init__(self, client: EtcdClient, prefix: str, patience: timedelta) -> None:
        super().__init__()
        self._client, self._prefix, self._patience = client, prefix, patience.total_seconds()

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        mark = (
            self._new_mark()
        )  # applied once: a repeated request that arrives late would restore an old value
        self._client.txn([absent(mark)], [put(self._prefix + key, data), put(mark, b"")])

    def get(self, key: str) -> bytes:
        self.wait([key])
        found = self._client.get(self._prefix + key)
        assert found is not None
        return found.value

    def add(self, key: str, amount: int) -> int:
        """Add once, although a request is repeated when its answer is lost: a mark shows that it
        was applied."""
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
                raise RuntimeError(
                    f"no other rank of the replica has set {', '.join(keys)} within {seconds:g} s"
                )
            time.sleep(_AGAIN)

    def delete_key(self, key: str) -> bool:
        return False  # the keys of the job are removed with the job
