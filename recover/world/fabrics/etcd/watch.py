"""A watch of etcd: a thread that follows all keys under a prefix, over lost connections and
compactions."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence

from recover.world.fabrics.etcd.client import EtcdClient, EtcdError, KeyValue, after, to_base64
from recover.world.fabrics.etcd.http_connection import HttpConnection

QUIET = 1.0  # seconds without a change after which all keys are read: the member of etcd may be lost
AGAIN = 0.05  # seconds between two attempts
CANCELED = 0.25  # seconds after etcd has canceled the watch: a login costs it a tenth of a second of a core


class EtcdWatch:
    """Calls `on_change` with every change, ordered by revision, on its own thread; first with all
    keys that exist.

    After a lost connection it reads all keys again, so that nothing is missed, whatever was
    compacted meanwhile. (Of several writes to a key in between, only the last is reported.)
    """

    def __init__(
        self, client: EtcdClient, prefix: str, on_change: Callable[[Sequence[KeyValue]], None]
    ) -> None:
        self._client, self._prefix, self._on_change = client, prefix, on_change
        self._known: dict[str, int] = {}
        self._connection: HttpConnection | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the watch. Returns when all existing keys have been reported."""
        revision = self._read_all()
        self._thread = threading.Thread(
            target=self._run, args=[revision], name="recover-etcd-watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._interrupt()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5 * QUIET)

    def _interrupt(self) -> None:
        """Wake the thread from its read."""
        if self._connection is not None:
            self._connection.shut_down()

    def _run(self, revision: int | None) -> None:
        while not self._stopped:
            try:
                self._follow(self._read_all() if revision is None else revision)
            except TimeoutError:
                pass  # no change
            except (OSError, ValueError, EtcdError):
                self._client.go_on()
                if not self._stopped:
                    time.sleep(AGAIN)
            revision = None

    def _read_all(self) -> int:
        there, revision = self._client.get_all(self._prefix)
        gone = self._known.keys() - {found.key for found in there}
        changes = [found for found in there if found.modified > self._known.get(found.key, 0)]
        changes += [KeyValue(key, b"", 0, revision) for key in gone]
        self._deliver(changes)
        return revision

    def _follow(self, revision: int) -> None:
        keys = self._client.prefix + self._prefix
        request = {
            "key": to_base64(keys),
            "range_end": to_base64(after(keys)),
            "start_revision": revision + 1,
        }
        connection = self._connection = self._client.stream("/v3/watch", {"create_request": request}, QUIET)
        try:
            while not self._stopped and (line := connection.readline()):
                result = json.loads(line).get("result")
                if result is None or result.get("canceled"):
                    # The next revision was compacted, or the token is not valid any more: etcd
                    # calls both a wrong token and a missing permission "permission denied" here.
                    # Reading all keys again shows which of these it is.
                    self._client.forget_login()
                    time.sleep(CANCELED)
                    return
                self._deliver(self._client.authentic(event["kv"] for event in result.get("events", [])))
        finally:
            connection.close()

    def _deliver(self, changes: Sequence[KeyValue]) -> None:
        for found in changes:
            self._known[found.key] = found.modified
            if not found.version:
                del self._known[found.key]
        if changes:
            self._on_change(sorted(changes, key=lambda found: found.modified))
