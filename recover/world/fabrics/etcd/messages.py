"""Small messages as keys in etcd, from one agreement to the next.

A message to one rank is read by polling. A message to all is written once, under a prefix that all
ranks watch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from recover.world.fabrics.base import FabricError
from recover.world.fabrics.etcd.agreement import TOLD
from recover.world.fabrics.etcd.client import EtcdClient, KeyValue

# Arguments: agreement, source, tag, and whether the source is dead.
Fetch = Callable[[int, int, int, bool], bytes | None]
MAIL_INTERVAL = 0.002  # seconds between two reads
MESSAGE_LIMIT = 1 << 20  # bytes; etcd takes 1.5 MiB in a request


def mail_key(agreement: int, to: int, tag: int, source: int) -> str:
    return f"mail/{agreement}/{to}/{tag}/{source}"


def told_key(agreement: int, tag: int, source: int) -> str:
    return f"{TOLD}{agreement}/{tag}/{source}"


def check_size(data: bytes, source: int) -> None:
    if len(data) > MESSAGE_LIMIT:
        raise ValueError(
            f"a message of {len(data)} bytes from rank {source}: etcd takes {MESSAGE_LIMIT} at most; send smaller "
            "census records, or run fewer ranks"
        )


class Sent:
    """A message that was sent: the write is committed."""

    data = b""

    def done(self) -> bool:
        return True


class Mailbox:
    """The messages for this rank since the last agreement."""

    def __init__(self, client: EtcdClient, rank: int) -> None:
        self._client, self._rank = client, rank
        self._arrived: dict[tuple[int, int, int], bytes] = {}  # by agreement, source and tag
        self._seen, self._asked = 0, float("-inf")
        self._told: dict[str, bytes] = {}

    def fetch(self, agreement: int, source: int, tag: int, gone: bool) -> bytes | None:
        """A message to this rank; None if it has not arrived.

        Raises FabricError if it never will: its sender died.
        """
        now = time.monotonic()
        if (agreement, source, tag) not in self._arrived and (gone or now > self._asked + MAIL_INTERVAL):
            self._asked = now
            place = f"mail/{agreement}/{self._rank}/"
            arrived, revision = self._client.get_all(place, self._seen + 1)
            self._arrived = {key: data for key, data in self._arrived.items() if key[0] == agreement}
            for found in arrived:
                its_tag, its_source = map(int, found.key.removeprefix(place).split("/"))
                self._arrived[agreement, its_source, its_tag] = found.value
            self._seen = revision
        data = self._arrived.get((agreement, source, tag))
        if data is None and gone:
            raise FabricError(f"rank {source} died before it sent the message that this rank waits for")
        return data

    def apply(self, changes: Iterable[KeyValue]) -> None:
        """Take in messages to all, and their deletion by the next decision."""
        for found in changes:
            if not found.key.startswith(TOLD):
                continue
            if found.version:
                self._told[found.key] = found.value
            else:
                self._told.pop(found.key, None)

    def told(self, agreement: int, source: int, tag: int, gone: bool) -> bytes | None:
        """As `fetch`, for a message to all."""
        key = told_key(agreement, tag, source)
        data = self._told.get(key)
        if data is None and gone:  # its death may arrive before its message
            found = self._client.get(key)
            if found is None:
                raise FabricError(f"rank {source} died before it sent the message that all wait for")
            data = found.value
        return data


class Expected:
    """A message that this rank waits for."""

    def __init__(self, fetch: Callable[[], bytes | None]) -> None:
        self.data = b""
        self._fetch, self._here = fetch, False

    def done(self) -> bool:
        if not self._here:
            data = self._fetch()
            self._here, self.data = data is not None, data or b""
        return self._here
