"""Small messages as keys in etcd, from one agreement to the next.

One to a single rank is looked for; one to all lies where all watch, so that it is written once and nobody asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from recover.world.fabrics.base import FabricError
from recover.world.fabrics.etcd.agreement import TOLD
from recover.world.fabrics.etcd.client import EtcdClient, KeyValue

Fetch = Callable[
    [int, int, int, bool], bytes | None
]  # by agreement, source, tag, and whether that one is gone
MAIL_INTERVAL = 0.002  # seconds between two looks for messages
MESSAGE_LIMIT = 1 << 20  # bytes; etcd takes 1.5 MiB in a request


def mail_key(agreement: int, to: int, tag: int, source: int) -> str:
    return f"mail/{agreement}/{to}/{tag}/{source}"


def told_key(agreement: int, tag: int, source: int) -> str:
    return f"{TOLD}{agreement}/{tag}/{source}"


def check_size(data: bytes, source: int) -> None:
    if len(data) > MESSAGE_LIMIT:
        raise ValueError(
            f"a message of {len(data)} bytes from rank {source}: etcd takes {MESSAGE_LIMIT} at most; census records "
            "must be small, or the world smaller"
        )


class Sent:
    """Etcd has it."""

    data = b""

    def done(self) -> bool:
        return True


class Mailbox:
    """What has come for this rank since an agreement."""

    def __init__(self, client: EtcdClient, rank: int) -> None:
        self._client, self._rank = client, rank
        self._arrived: dict[tuple[int, int, int], bytes] = {}  # by agreement, source and tag
        self._seen, self._asked = 0, float("-inf")
        self._told: dict[str, bytes] = {}

    def fetch(self, agreement: int, source: int, tag: int, gone: bool) -> bytes | None:
        """A message that has come. Raises FabricError if none will, since its sender is gone."""
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
            raise FabricError(f"rank {source} is dead, and has not sent what was waited for")
        return data

    def heard(self, news: Iterable[KeyValue]) -> None:
        """What was told to all, and when it is of no use any more."""
        for found in news:
            if not found.key.startswith(TOLD):
                continue
            if found.version:
                self._told[found.key] = found.value
            else:
                self._told.pop(found.key, None)

    def told(self, agreement: int, source: int, tag: int, gone: bool) -> bytes | None:
        """As `fetch`, of what was told to all."""
        key = told_key(agreement, tag, source)
        data = self._told.get(key)
        if data is None and gone:  # its death may be known before what it said
            found = self._client.get(key)
            if found is None:
                raise FabricError(f"rank {source} is dead, and has not told what was waited for")
            data = found.value
        return data


class Expected:
    """A message that is waited for."""

    def __init__(self, fetch: Callable[[], bytes | None]) -> None:
        self.data = b""
        self._fetch, self._here = fetch, False

    def done(self) -> bool:
        if not self._here:
            data = self._fetch()
            self._here, self.data = data is not None, data or b""
        return self._here
