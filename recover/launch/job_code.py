"""Digests of the code of a job that replicas may join: recorded from its start, compared before a
replica asks to join.

code               in etcd, under the prefix of the run: digests by name, for ranks of all hosts
SESSION/code.json  the same with the paths on this host, for its agent: it starts no replica while a
file differs
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from recover.job.code import Loaded, differences, file_digest, loaded
from recover.world.fabrics.etcd.client import EtcdClient, EtcdError, get, put, version_is

KEY, FILE = "code", "code.json"


class JobCode:
    """Digests of code as a rank uses them: compared before it joins, published once it is a member."""

    def __init__(self, client: EtcdClient, session: Path) -> None:
        self._client, self._session = client, session
        self._published = 0

    def differs(self) -> str:
        """For a rank that is about to ask: the differences from the code of the job, or "". Raises
        EtcdError."""
        job, _ = self._read()
        self._leave(job)
        return "; ".join(differences(job, loaded))

    def publish(self, first: bool) -> None:
        """Called by members: publish what was loaded since the last call. `first`: for the other
        hosts, too."""
        if len(loaded) == self._published:
            return
        mine = {name: each.digest for name, each in loaded.items()}
        try:
            job, version = self._read()
            if first and not mine.keys() <= job.keys():
                value = json.dumps(mine | job).encode()  # what was published first stays
                self._client.txn([version_is(KEY, version)], [put(KEY, value)])
        except EtcdError:
            return  # tried again after the next step
        self._leave(mine | job)
        self._published = len(mine)

    def _read(self) -> tuple[dict[str, str], int]:
        found = self._client.read(get(KEY)).found[0]
        return (json.loads(found[0].value), found[0].version) if found else ({}, 0)

    def _leave(self, job: Mapping[str, str]) -> None:
        here = {name: [each.path, job.get(name, each.digest)] for name, each in loaded.items() if each.path}
        draft = self._session / f".{FILE}.{os.getpid()}"
        try:
            draft.write_text(json.dumps(_known(self._session) | here))
            draft.replace(self._session / FILE)
        except OSError:
            pass  # the ranks that join compare it themselves


class HostCode:
    """Digests of code as an agent uses them: whether the files on this host are still those of the job."""

    def __init__(self, session: Path) -> None:
        self._session = session
        self._read: dict[str, tuple[tuple[int, int], str]] = {}  # by path: when it was read, and its digest

    def differs(self) -> str:
        """The first difference from the code of the job, or ""."""
        known = _known(self._session)
        job = {name: digest for name, (_, digest) in known.items()}
        mine = {name: Loaded(path, self._digest(path)) for name, (path, _) in known.items()}
        return "; ".join(differences(job, mine))

    def _digest(self, path: str) -> str:
        try:
            now = os.stat(path)
            stamp = now.st_mtime_ns, now.st_size
            if self._read.get(path, ((0, 0), ""))[0] != stamp:
                self._read[path] = stamp, file_digest(Path(path).read_bytes())
        except OSError:
            return "missing"
        return self._read[path][1]


def _known(session: Path) -> dict[str, list[str]]:
    try:
        found: dict[str, list[str]] = json.loads((session / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found
