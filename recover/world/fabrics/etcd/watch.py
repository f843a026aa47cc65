"""News from etcd: a thread that follows all keys under a prefix, over lost connections and compactions."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence

from recover.world.fabrics.etcd.client import EtcdClient, EtcdError, KeyValue, after, to_base64
from recover.world.fabrics.etcd.http_connection import Line

QUIET = 1.0  # seconds without news after which it is asked whether there is really none: a member may be lost
AGAIN = 0.05  # seconds between two tries
CANCELED = 0.25  # seconds after etcd has canceled the watch: a login costs it a tenth of a second of a core


class EtcdWatch:
    """`on_news` gets every change in the order of its revision, on the watch's thread; first of all, what is there.

    After a lost connection it reads the whole anew, so that nothing is missed whatever was compacted meanwhile. (Of a
    key that was written several times in between, the last state alone is told.)
    """

    def __init__(
        self, client: EtcdClient, prefix: str, on_news: Callable[[Sequence[KeyValue]], None]
    ) -> None:
        self._client, self._prefix, self._on_news = client, prefix, on_news
        self._known: dict[str, int] = {}
        self._line: Line | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Returns when what is there has been told."""
        revision = self._read_all()
        self._thread = threading.Thread(
            target=self._run, args=[revision], name="recover-etcd-watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._free()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5 * QUIET)

    def _free(self) -> None:
        """The thread from its read."""
        if self._line is not None:
            self._line.cut()

    def _run(self, revision: int | None) -> None:
        while not self._stopped:
            try:
                self._follow(self._read_all() if revision is None else revision)
            except TimeoutError:
                pass  # it was quiet
            except (OSError, ValueError, EtcdError):
                self._client.go_on()
                if not self._stopped:
                    time.sleep(AGAIN)
            revision = None

    def _read_all(self) -> int:
        there, revision = self._client.get_all(self._prefix)
        gone = self._known.keys() - {found.key for found in there}
        news = [found for found in there if found.modified > self._known.get(found.key, 0)]
        news += [KeyValue(key, b"", 0, revision) for key in gone]
        self._tell(news)
        return revision

    def _follow(self, revision: int) -> None:
        keys = self._client.prefix + self._prefix
        request = {
            "key": to_base64(keys),
            "range_end": to_base64(after(keys)),
            "start_revision": revision + 1,
        }
        line = self._line = self._client.stream("/v3/watch", {"create_request": request}, QUIET)
        try:
            while not self._stopped and (told := line.readline()):
                result = json.loads(told).get("result")
                if result is None or result.get("canceled"):
                    # What comes next was compacted away, or the token is not valid any more: etcd calls both a
                    # wrong token and a missing permission "permission denied" here. To read the whole again tells.
                    self._client.forget_login()
                    time.sleep(CANCELED)
                    return
                self._tell(self._client.authentic(event["kv"] for event in result.get("events", [])))
        finally:
            line.close()

    def _tell(self, news: Sequence[KeyValue]) -> None:
        for found in news:
            self._known[found.key] = found.modified
            if not found.version:
                del self._known[found.key]
        if news:
            self._on_news(sorted(news, key=lambda found: found.modified))
