"""Small messages as keys in etcd, from one agreement to the next."""

from __future__ import annotations

import time
from collections.abc import Callable

from recover.etcd.etcd_client import EtcdClient
from recover.fabrics.base import FabricError

MAIL_INTERVAL = 0.002  # seconds between two looks for messages
MESSAGE_LIMIT = 1 << 20  # bytes; etcd takes 1.5 MiB in a request


def mail_key(agreement: int, to: int, tag: int, source: int) -> str:
    return f"mail/{agreement}/{to}/{tag}/{source}"


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
