"""Notes on slots for hosts that share no directory: in etcd, so that all survivors read the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from recover.world.fabrics.etcd.agreement import rank_of
from recover.world.fabrics.etcd.client import EtcdClient
from recover.world.slot_notes import Note, RunNotes

NOTES = "notes/"


class EtcdNotes:
    """One note for each rank that was lost over its slots.

    The run directory of its host has a copy for users.
    """

    def __init__(self, client: EtcdClient, rank: int, files: RunNotes) -> None:
        self._client, self._rank, self._files = client, rank, files

    def leave(
        self, step: int, suspects: Sequence[tuple[int, int]], why: str, rank: int | None = None
    ) -> None:
        note = json.dumps({"step": step, "suspects": suspects, "why": why})
        self._client.put(f"{NOTES}{self._rank if rank is None else rank}", note.encode())
        self._files.leave(step, suspects, why, rank)

    def read(self, step: int) -> Iterator[Note]:
        found, _ = self._client.get_all(NOTES)
        for one in sorted(found, key=rank_of):
            note = json.loads(one.value)
            if note["step"] == step:
                suspects = tuple((slot, sample) for slot, sample in note["suspects"])
                yield Note(rank_of(one), suspects, note["why"])
